"""What crosses from stage to stage: values of edges and their gradients, lent parameters and theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import tensor
from fxpar.ir.plan import PlannedParameter
from fxpar.ir.stage import PlannedStage, Port, PortKind, StageBorder
from fxpar.resharding.pipeline import Crossing
from fxpar.schedule import Edge


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


def stage_edges(stages: Sequence[StageNodes], *, multicast: bool) -> tuple[Edge, ...]:
    """Every value that some stage makes and later ones use, in the order of the stages; `multicast` as of `Edge`."""
    edges = []
    for source in stages:
        for port in source.outputs:
            if port.kind is PortKind.EDGE:
                readers = tuple(stage.index for stage in stages if port in stage.inputs)
                edges.append(Edge(port.name, source.index, readers, port in source.tangents, multicast))
    return tuple(edges)


@dataclass(frozen=True, slots=True)
class Loan:
    """A parameter that the ranks of stage `owner` have, as `layout`, and those of the stages `borrowers` use, too.

    Stages at one place on the pipe axis share what they have: `owner` and each of `borrowers` stand for all there that
    use it, who are in `together`.
    """

    port: Port
    owner: int
    layout: Layout
    borrowers: tuple[int, ...]
    together: Mapping[int, tuple[int, ...]]


def loans(
    stages: Sequence[StageNodes], owners: Mapping[str, PlannedParameter], placement: Sequence[int]
) -> tuple[Loan, ...]:
    """Every parameter that is used where it is not owned, or by several stages where it is."""
    found = []
    for name, owned in owners.items():
        port = Port(PortKind.PARAMETER, name)
        users: dict[int, list[int]] = {placement[owned.stage]: [owned.stage]}
        for stage in stages:
            if port in stage.inputs and stage.index != owned.stage:
                users.setdefault(placement[stage.index], []).append(stage.index)
        if sum(map(len, users.values())) > 1:
            together = {members[0]: tuple(members) for members in users.values()}
            borrowers = tuple(first for first in together if first != owned.stage)
            found.append(Loan(port, owned.stage, owned.layout, borrowers, together))
    return tuple(found)


def value_crossings(edge: Edge, stages: Sequence[StageNodes], placement: Sequence[int]) -> list[Crossing]:
    """The value of an edge on its way to its readers: to those of other ranks, and to those of the same."""
    port, maker, found = Port(PortKind.EDGE, edge.name), stages[edge.source], []
    for targets in edge.targets_together(placement):
        layouts = tuple(stages[reader].border.inputs[port] for reader in targets)
        dtype, pipes = tensor(maker.outputs[port]).dtype, _pipes(edge.source, targets, placement)
        found.append(Crossing(port, False, edge.source, targets, maker.border.outputs[port], layouts, dtype, pipes))
    return found


def gradient_crossing(edge: Edge, reader: int, stages: Sequence[StageNodes], placement: Sequence[int]) -> Crossing:
    """The gradient of an edge on its way back; that of a reader which has none lies as the value does."""
    port, maker, border = Port(PortKind.EDGE, edge.name), stages[edge.source], stages[reader].border
    given, needed = border.gradients.get(port, border.inputs[port]), maker.border.tangents[port]
    dtype, targets = tensor(maker.tangents[port]).dtype, (edge.source,)
    return Crossing(port, True, reader, targets, given, (needed,), dtype, _pipes(reader, targets, placement))


def loan_crossing(loan: Loan, stages: Sequence[StageNodes], placement: Sequence[int]) -> Crossing:
    """A parameter on its way to its borrowers."""
    layouts = tuple(stages[borrower].border.inputs[loan.port] for borrower in loan.borrowers)
    dtype = tensor(stages[loan.borrowers[0]].inputs[loan.port]).dtype
    pipes = _pipes(loan.owner, loan.borrowers, placement)
    return Crossing(loan.port, False, loan.owner, loan.borrowers, loan.layout, layouts, dtype, pipes)


def return_crossing(loan: Loan, borrower: int, stages: Sequence[StageNodes], placement: Sequence[int]) -> Crossing:
    """The gradient of a lent parameter on its way back, with nothing partial any more: it lies as the parameter."""
    with_gradient = next(stage for stage in loan.together[borrower] if loan.port in stages[stage].gradients)
    dtype, lent = tensor(stages[with_gradient].gradients[loan.port]).dtype, stages[borrower].border.inputs[loan.port]
    targets = (loan.owner,)
    return Crossing(
        loan.port, True, borrower, targets, lent, (loan.layout,), dtype, _pipes(borrower, targets, placement)
    )


def _pipes(source: int, targets: Sequence[int], placement: Sequence[int]) -> tuple[int, ...]:
    return tuple(placement[stage] for stage in (source, *targets))
