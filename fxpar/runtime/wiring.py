"""Connect the stages: the edges between them, the ways of what crosses, and the parameters they share."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.mesh import Mesh
from fxpar.model.distribution import Distribution
from fxpar.runtime.executor import Traffic
from fxpar.runtime.lending import Lending, Loan
from fxpar.runtime.transport import Piece, Route
from fxpar.schedule import Edge
from fxpar.stage import CompiledStage, PlannedStage, Port, PortKind

_LENDING_TAGS = 1 << 20
"""Tags from here on belong to parameters on loan; edges use the ones below."""


def stage_edges(stages: Sequence[PlannedStage], *, with_backward: bool) -> tuple[Edge, ...]:
    """Every value that some stage makes and later ones use, in the order of the stages."""
    edges = []
    for source in stages:
        for port in source.joint.outputs:
            if port.kind is PortKind.EDGE:
                readers = tuple(stage.joint.index for stage in stages if port in stage.joint.inputs)
                differentiable = with_backward and port in source.joint.tangents
                edges.append(Edge(port.name, source.joint.index, readers, differentiable))
    return tuple(edges)


def make_traffic(
    stages: Sequence[PlannedStage], own: CompiledStage, mesh: Mesh, microbatches: int
) -> dict[tuple[str, int, int], Traffic]:
    """The way of each (edge, source stage, target stage) that `own` takes part in; for gradients too, which go back."""
    traffic: dict[tuple[str, int, int], Traffic] = {}
    pieces = dict(zip(own.inputs, own.input_pieces, strict=True))
    gradient_pieces = dict(zip(own.tangents, own.tangent_pieces, strict=True))
    tag = 0
    for edge in stage_edges(stages, with_backward=True):
        port = Port(PortKind.EDGE, edge.name)
        source = stages[edge.source]
        for reader in edge.targets:
            ends = [(edge.source, reader)] + ([(reader, edge.source)] if edge.differentiable else [])
            for start, end in ends:
                tag += 1
                if own.index not in (start, end):
                    continue
                there = start == edge.source
                border = stages[reader].border
                layouts = (
                    (source.border.outputs[port], border.inputs[port])
                    if there
                    else (border.gradients.get(port, border.inputs[port]), source.border.tangents[port])
                )
                name = (
                    f"{'the value' if there else 'the gradient'} of edge {edge.name} from stage {start} to stage {end}"
                )
                route = Route(name, tag, mesh, (start, layouts[0]), (end, layouts[1]), microbatches)
                arriving = (pieces if there else gradient_pieces)[port] if end == own.index else None
                traffic[edge.name, start, end] = Traffic(route, None if arriving is None else Piece.like(arriving))
    return traffic


def make_lending(stages: Sequence[PlannedStage], own: CompiledStage, distribution: Distribution) -> Lending:
    """The loans of parameters that several stages use; each lies alike on all of them."""
    mesh = distribution.mesh
    pieces = dict(zip(own.inputs, own.input_pieces, strict=True))
    loans = []
    tag = _LENDING_TAGS
    for name, planned in distribution.final_plan.parameters.items():
        port = Port(PortKind.PARAMETER, name)
        for borrower in stages:
            if port not in borrower.joint.inputs or borrower.joint.index == planned.stage:
                continue
            tag += 2
            if own.index not in (planned.stage, borrower.joint.index):
                continue
            owner, user = (planned.stage, planned.layout), (borrower.joint.index, borrower.border.inputs[port])
            there = Route(f"parameter {name} on loan to stage {user[0]}", tag, mesh, owner, user, 1)
            back = None
            if port in borrower.border.gradients:
                back = Route(f"the gradient of parameter {name} from stage {user[0]}", tag + 1, mesh, user, owner, 1)
            loans.append(Loan(name, Piece.like(pieces[port]), own.index == user[0], there, back))
    return Lending(loans)
