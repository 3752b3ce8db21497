"""Connect the stages: the edges between them, the ways of what crosses, and the parameters they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpar.layout import Layout
from fxpar.mesh import Mesh
from fxpar.model.distribution import Distribution
from fxpar.runtime.executor import Traffic
from fxpar.runtime.lending import Lending, Loan
from fxpar.runtime.transport import Piece, Receipt, Route, Shipment
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


@dataclass(frozen=True, slots=True)
class _RoutePerTarget:
    """The way of a multicast: on its source a route to each target, on a target the one that ends there."""

    routes: tuple[Route, ...]

    def send(self, value: Tensor, microbatch: int) -> list[Shipment]:
        return [shipment for route in self.routes for shipment in route.send(value, microbatch)]

    def post_receive(self, piece: Piece, microbatch: int) -> Receipt:
        (route,) = self.routes
        return route.post_receive(piece, microbatch)

    def wait(self, receipt: Receipt) -> Tensor:
        (route,) = self.routes
        return route.wait(receipt)


def make_traffic(
    stages: Sequence[PlannedStage], own: CompiledStage, mesh: Mesh, microbatches: int
) -> dict[tuple[str, int], Traffic]:
    """The way of what each (edge, stage) sends, of those that `own` takes part in.

    The stage that makes an edge sends its value to all readers, and each reader its own gradient back.
    """
    traffic: dict[tuple[str, int], Traffic] = {}
    pieces = {port: Piece.like(piece) for port, piece in zip(own.inputs, own.input_pieces, strict=True)}
    gradient_pieces = {port: Piece.like(piece) for port, piece in zip(own.tangents, own.tangent_pieces, strict=True)}
    tag = 0
    for edge in stage_edges(stages, with_backward=True):
        port, made = Port(PortKind.EDGE, edge.name), stages[edge.source].border
        values = []
        for reader in edge.targets:
            tag += 2
            if own.index not in (edge.source, reader):
                continue
            read = stages[reader].border
            ends = (edge.source, made.outputs[port]), (reader, read.inputs[port])
            values.append(Route(_described("value", edge, *ends), tag, mesh, *ends, microbatches))
            if edge.differentiable:
                # A reader whose results do not depend on the value sends zeros, as the value lies there.
                ends = (reader, read.gradients.get(port, read.inputs[port])), (edge.source, made.tangents[port])
                back = Route(_described("gradient", edge, *ends), tag + 1, mesh, *ends, microbatches)
                traffic[edge.name, reader] = Traffic(back, gradient_pieces.get(port))
        if values:
            traffic[edge.name, edge.source] = Traffic(_RoutePerTarget(tuple(values)), pieces.get(port))
    return traffic


def _described(what: str, edge: Edge, source: tuple[int, Layout], target: tuple[int, Layout]) -> str:
    return f"the {what} of edge {edge.name} from stage {source[0]} to stage {target[0]}"


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
