"""What crosses from stage to stage: values of edges and their gradients, lent parameters and theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.annotate import tensor
from fxpar.layout import Layout
from fxpar.pipeline import Crossing
from fxpar.plan import PlannedParameter
from fxpar.schedule import Edge
from fxpar.stage import PlannedStage, Port, PortKind, StageBorder


@dataclass(frozen=True, slots=True)
class StageNodes:
    """A planned stage with the nodes at the border of its joint graph, by port."""

    planned: PlannedStage
    inputs: Mapping[Port, fx.Node]
    tangents: Mapping[Port, fx.Node]
    outputs: Mapping[Port, fx.Node]
    gradients: Mapping[Port, fx.Node]

    @classmethod
    def of(cls, planned: PlannedStage) -> StageNodes:
        """Read them from the graph."""
        joint = planned.joint
        placeholders = joint.module.graph.find_nodes(op="placeholder")
        (output,) = joint.module.graph.find_nodes(op="output")
        returned = output.args[0]
        return cls(
            planned,
            dict(zip(joint.inputs, placeholders[: len(joint.inputs)], strict=True)),
            dict(zip(joint.tangents, placeholders[len(joint.inputs) :], strict=True)),
            dict(zip(joint.outputs, returned[: len(joint.outputs)], strict=True)),
            dict(zip(joint.gradients, returned[len(joint.outputs) :], strict=True)),
        )

    @property
    def index(self) -> int:
        """Which stage it is."""
        return self.planned.joint.index

    @property
    def border(self) -> StageBorder:
        """How everything at its border lies."""
        return self.planned.border


def stage_edges(stages: Sequence[StageNodes]) -> tuple[Edge, ...]:
    """Every value that some stage makes and later ones use, in the order of the stages."""
    edges = []
    for source in stages:
        for port in source.outputs:
            if port.kind is PortKind.EDGE:
                readers = tuple(stage.index for stage in stages if port in stage.inputs)
                edges.append(Edge(port.name, source.index, readers, port in source.tangents))
    return tuple(edges)


@dataclass(frozen=True, slots=True)
class Loan:
    """A parameter that stage `owner` has, as `layout`, and the stages `borrowers` use, too."""

    port: Port
    owner: int
    layout: Layout
    borrowers: tuple[int, ...]


def loans(stages: Sequence[StageNodes], owners: Mapping[str, PlannedParameter]) -> tuple[Loan, ...]:
    """Every parameter that stages use which do not own it."""
    found = []
    for name, owned in owners.items():
        port = Port(PortKind.PARAMETER, name)
        borrowers = tuple(stage.index for stage in stages if port in stage.inputs and stage.index != owned.stage)
        if borrowers:
            found.append(Loan(port, owned.stage, owned.layout, borrowers))
    return tuple(found)


def value_crossing(edge: Edge, stages: Sequence[StageNodes]) -> Crossing:
    """The value of an edge on its way to its readers."""
    port, maker = Port(PortKind.EDGE, edge.name), stages[edge.source]
    layouts = tuple(stages[reader].border.inputs[port] for reader in edge.targets)
    dtype = tensor(maker.outputs[port]).dtype
    return Crossing(port, False, edge.source, edge.targets, maker.border.outputs[port], layouts, dtype)


def gradient_crossing(edge: Edge, reader: int, stages: Sequence[StageNodes]) -> Crossing:
    """The gradient of an edge on its way back; that of a reader which has none lies as the value does."""
    port, maker, border = Port(PortKind.EDGE, edge.name), stages[edge.source], stages[reader].border
    given, needed = border.gradients.get(port, border.inputs[port]), maker.border.tangents[port]
    return Crossing(port, True, reader, (edge.source,), given, (needed,), tensor(maker.tangents[port]).dtype)


def loan_crossing(loan: Loan, stages: Sequence[StageNodes]) -> Crossing:
    """A parameter on its way to its borrowers."""
    layouts = tuple(stages[borrower].border.inputs[loan.port] for borrower in loan.borrowers)
    dtype = tensor(stages[loan.borrowers[0]].inputs[loan.port]).dtype
    return Crossing(loan.port, False, loan.owner, loan.borrowers, loan.layout, layouts, dtype)


def return_crossing(loan: Loan, borrower: int, stages: Sequence[StageNodes]) -> Crossing:
    """The gradient of a lent parameter on its way back, with nothing partial any more: it lies as the parameter."""
    stage = stages[borrower]
    dtype = tensor(stage.gradients[loan.port]).dtype
    return Crossing(loan.port, True, borrower, (loan.owner,), stage.border.inputs[loan.port], (loan.layout,), dtype)
