"""What stages exchange: edges between them, and the messages that each action receives and sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from fxpar.schedule.action import Action, Kind


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that stage `source` makes and the later stages `targets` use, whether or not they are adjacent.

    If it is `differentiable`, every target sends its gradient back to the source, which adds them up. If it is a
    `multicast`, one transfer serves all targets on other ranks than the source's; otherwise each such rank has a
    transfer of its own, so that none waits for another.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    differentiable: bool = True
    multicast: bool = True

    def __post_init__(self) -> None:
        ascending = all(stage < later for stage, later in pairwise((self.source, *self.targets)))
        assert self.targets and ascending, f"edge {self}: its targets must ascend from its source"

    def targets_together(self, placement: Sequence[int]) -> list[tuple[int, ...]]:
        """The targets of each transfer: those on other ranks than the source's, then those on the same."""
        own = placement[self.source]
        by_rank: dict[int, tuple[int, ...]] = {}
        for target in self.targets:
            to = -1 if self.multicast and placement[target] != own else placement[target]
            by_rank[to] = (*by_rank.get(to, ()), target)
        return sorted(by_rank.values(), key=lambda targets: placement[targets[0]] == own)


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges of a model in which each stage only feeds the next one."""
    return tuple(Edge(f"out{stage}", stage, (stage + 1,)) for stage in range(num_stages - 1))


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of one microbatch: the value of `edge` to its readers or, in the backward, the gradient of one.

    With targets on several ranks it is a multicast: the source sends once, and each rank passes what it receives on to
    the next one. What stays on a rank is a transfer, too.
    """

    edge: str
    microbatch: int
    source: int
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(stage < later for stage, later in pairwise((self.source, *self.targets)))
        is_gradient = len(self.targets) == 1 and self.targets[0] < self.source
        assert self.targets and (ascending or is_gradient), f"{self!r}: a value's targets ascend, a gradient has one"

    @property
    def is_backward(self) -> bool:
        """Whether it moves a gradient; values only move to later stages."""
        return self.source > self.targets[0]

    def __str__(self) -> str:
        gradient = "gradient of " if self.is_backward else ""
        return f"{gradient}{self.edge}[{self.microbatch}] {self.source}->{','.join(map(str, self.targets))}"


_Route: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Edge, source stage and target stages of a transfer, without its microbatch."""

_RouteTable: TypeAlias = defaultdict[tuple[int, Kind], list[_Route]]
"""Stage and kind of an action -> its transfers."""


class Routes:
    """The transfers that an action needs and makes, given the edges between the stages, and the rank of each stage.

    By default stage s is on rank s. An action's transfers are in the order of the edges, those of near stages first:
    they are needed soonest.
    """

    def __init__(self, edges: Sequence[Edge], placement: Sequence[int] | None = None) -> None:
        last = max([0, *(stage for edge in edges for stage in edge.targets)])
        self._rank_of = tuple(range(last + 1)) if placement is None else tuple(placement)
        self._received: _RouteTable = defaultdict(list)
        self._sent: _RouteTable = defaultdict(list)
        self._known: dict[tuple[_Route, int], Transfer] = {}
        for edge in edges:
            for targets in edge.targets_together(self._rank_of):
                self._add("F", (edge.name, edge.source, targets))
            for reader in edge.targets if edge.differentiable else ():
                self._add("B", (edge.name, reader, (edge.source,)))
                self._add("I", (edge.name, reader, (edge.source,)))
        for (stage, _), routes in (*self._received.items(), *self._sent.items()):
            routes.sort(key=partial(_distance, stage))

    def _add(self, kind: Kind, route: _Route) -> None:
        _, source, targets = route
        self._sent[source, kind].append(route)
        for target in targets:
            self._received[target, kind].append(route)

    def received(self, action: Action) -> list[Transfer]:
        """What must have arrived before `action` runs: values for F, gradients for B or I."""
        return self._transfers(self._received, action)

    def sent(self, action: Action) -> list[Transfer]:
        """What is sent as soon as `action` has run."""
        return self._transfers(self._sent, action)

    def _transfers(self, table: _RouteTable, action: Action) -> list[Transfer]:
        """The action's transfers; each is the same object in every call, which makes lookups faster."""
        found = []
        for route in table.get((action.stage, action.kind), ()):
            key = route, action.microbatch
            if key not in self._known:
                edge, source, targets = route
                self._known[key] = Transfer(edge, action.microbatch, source, targets)
            found.append(self._known[key])
        return found

    def source_rank(self, transfer: Transfer) -> int:
        """The rank that sends `transfer`."""
        return self._rank_of[transfer.source]

    def target_ranks(self, transfer: Transfer) -> tuple[int, ...]:
        """The ranks that receive `transfer`, each once, in the order in which they pass it on."""
        return tuple(dict.fromkeys(self._rank_of[target] for target in transfer.targets))

    def stays(self, transfer: Transfer) -> bool:
        """Whether it stays on its rank."""
        return self._rank_of[transfer.targets[0]] == self._rank_of[transfer.source]


def _distance(stage: int, route: _Route) -> int:
    """The distance of `stage` to the other end: the source or, for the source itself, the first target."""
    _, source, targets = route
    return abs(stage - (targets[0] if stage == source else source))
