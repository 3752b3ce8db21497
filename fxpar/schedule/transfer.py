"""What stages exchange: edges between them, and the messages that each action receives and sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fxpar.schedule.action import Action, Kind


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that stage `source` makes and the later stages `targets` use, whether or not they are adjacent.

    If it is `differentiable`, every target sends its gradient back to the source, which adds them up.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    differentiable: bool = True

    def __post_init__(self) -> None:
        ascending = all(stage < later for stage, later in pairwise((self.source, *self.targets)))
        assert self.targets and ascending, f"edge {self}: its targets must ascend from its source"


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges of a model whose every stage feeds the next one alone."""
    return tuple(Edge(f"out{stage}", stage, (stage + 1,)) for stage in range(num_stages - 1))


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of one microbatch: the value of `edge` or, on the way back, its gradient."""

    edge: str
    microbatch: int
    source: int
    target: int

    @property
    def is_backward(self) -> bool:
        """Whether it moves a gradient; values only move to later stages."""
        return self.source > self.target

    def __str__(self) -> str:
        gradient = "gradient of " if self.is_backward else ""
        return f"{gradient}{self.edge}[{self.microbatch}] {self.source}->{self.target}"


_RouteTable: TypeAlias = defaultdict[tuple[int, Kind], list[tuple[str, int, int]]]
"""Stage and kind of an action -> edge, source stage and target stage of its transfers."""


class Routes:
    """The transfers that an action needs and makes, given the edges between the stages.

    An action's transfers are in the order of the edges, those of near stages first: they are needed soonest.
    """

    def __init__(self, edges: Sequence[Edge]) -> None:
        self._received: _RouteTable = defaultdict(list)
        self._sent: _RouteTable = defaultdict(list)
        for edge in edges:
            for target in edge.targets:
                self._add("F", edge.name, edge.source, target)
                if edge.differentiable:
                    self._add("B", edge.name, target, edge.source)
                    self._add("I", edge.name, target, edge.source)
        for routes in (*self._received.values(), *self._sent.values()):
            routes.sort(key=_distance)

    def _add(self, kind: Kind, edge: str, source: int, target: int) -> None:
        self._sent[source, kind].append((edge, source, target))
        self._received[target, kind].append((edge, source, target))

    def received(self, action: Action) -> list[Transfer]:
        """What must have arrived before `action` runs: values for F, gradients for B or I."""
        return _transfers(self._received, action)

    def sent(self, action: Action) -> list[Transfer]:
        """What leaves as soon as `action` has run."""
        return _transfers(self._sent, action)


def _distance(route: tuple[str, int, int]) -> int:
    _, source, target = route
    return abs(source - target)


def _transfers(table: _RouteTable, action: Action) -> list[Transfer]:
    routes = table.get((action.stage, action.kind), [])
    return [Transfer(edge, action.microbatch, source, target) for edge, source, target in routes]
