"""The transfers between stages: of the values and gradients of edges, and of tied parameters and their gradients."""

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
        """The layouts of everything at its border."""
        return self.planned.border


def stage_edges(stages: Sequence[StageNodes], *, multicast: bool) -> tuple[Edge, ...]:
    """Every value that one stage produces and later ones use, in the order of the stages; `multicast` as of `Edge`."""
    edges = []
    for source in stages:
        for port in source.outputs:
            if port.kind is PortKind.EDGE:
                readers = tuple(stage.index for stage in stages if port in stage.inputs)
                edges.append(Edge(port.name, source.index, readers, port in source.tangents, multicast))
    return tuple(edges)


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several stages use: stage `owner` stores it in `layout`, and `users` are others.

    Stages at one place on the pipe axis share one copy: `owner` and each of `users` stand for all stages there that use
    the parameter, which `together` lists.
    """

    port: Port
    owner: int
    layout: Layout
    users: tuple[int, ...]
    together: Mapping[int, tuple[int, ...]]


def tied_parameters(
    stages: Sequence[StageNodes], owners: Mapping[str, PlannedParameter], placement: Sequence[int]
) -> tuple[TiedParameter, ...]:
    """Every parameter that is used where it is not owned, or by several stages where it is."""
    found = []
    for name, owned in owners.items():
        port = Port(PortKind.PARAMETER, name)
        by_place: dict[int, list[int]] = {placement[owned.stage]: [owned.stage]}
        for stage in stages:
            if port in stage.inputs and stage.index != owned.stage:
                by_place.setdefault(placement[stage.index], []).append(stage.index)
        if sum(map(len, by_place.values())) > 1:
            together = {members[0]: tuple(members) for members in by_place.values()}
            users = tuple(first for first in together if first != owned.stage)
            found.append(TiedParameter(port, owned.stage, owned.layout, users, together))
    return tuple(found)


def value_crossings(edge: Edge, stages: Sequence[StageNodes], placement: Sequence[int]) -> list[Crossing]:
    """The transfers of an edge's value to its consumers, on other ranks and on the same."""
    port, maker, found = Port(PortKind.EDGE, edge.name), stages[edge.source], []
    for targets in edge.targets_together(placement):
        layouts = tuple(stages[reader].border.inputs[port] for reader in targets)
        dtype, pipes = tensor(maker.outputs[port]).dtype, _pipes(edge.source, targets, placement)
        found.append(Crossing(port, False, edge.source, targets, maker.border.outputs[port], layouts, dtype, pipes))
    return found


def gradient_crossing(edge: Edge, reader: int, stages: Sequence[StageNodes], placement: Sequence[int]) -> Crossing:
    """The transfer of an edge's gradient back; the zeros of a consumer that has none have the layout of the value."""
    port, maker, border = Port(PortKind.EDGE, edge.name), stages[edge.source], stages[reader].border
    given, needed = border.gradients.get(port, border.inputs[port]), maker.border.tangents[port]
    dtype, targets = tensor(maker.tangents[port]).dtype, (edge.source,)
    return Crossing(port, True, reader, targets, given, (needed,), dtype, _pipes(reader, targets, placement))


def tied_crossing(tied: TiedParameter, stages: Sequence[StageNodes], placement: Sequence[int]) -> Crossing:
    """The transfer of a tied parameter to its other users."""
    layouts = tuple(stages[user].border.inputs[tied.port] for user in tied.users)
    dtype = tensor(stages[tied.users[0]].inputs[tied.port]).dtype
    pipes = _pipes(tied.owner, tied.users, placement)
    return Crossing(tied.port, False, tied.owner, tied.users, tied.layout, layouts, dtype, pipes)


def tied_gradient_crossing(
    tied: TiedParameter, user: int, stages: Sequence[StageNodes], placement: Sequence[int]
) -> Crossing:
    """The transfer of a tied parameter's gradient to the owner, in the parameter's layouts, which are never partial."""
    with_gradient = next(stage for stage in tied.together[user] if tied.port in stages[stage].gradients)
    dtype = tensor(stages[with_gradient].gradients[tied.port]).dtype
    layout = stages[user].border.inputs[tied.port]
    targets = (tied.owner,)
    return Crossing(tied.port, True, user, targets, layout, (tied.layout,), dtype, _pipes(user, targets, placement))


def _pipes(source: int, targets: Sequence[int], placement: Sequence[int]) -> tuple[int, ...]:
    return tuple(placement[stage] for stage in (source, *targets))
