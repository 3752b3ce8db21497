"""What the two ends of a message, and its resharding plan, each expect it to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxpar.schedule.transfer import Edge

End: TypeAlias = tuple[str, int, bool]
"""Edge, stage, and whether it is the edge's gradient: something that a stage sends or receives."""

Hop: TypeAlias = tuple[str, int, int]
"""Edge, source stage and target stage: what the target receives or, if both are the same, what that stage sends."""


@dataclass(frozen=True, slots=True)
class Message:
    """One whole value of a microbatch, as seen at one end of an edge; `layout` is any description of its sharding."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: object

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"shape {list(self.shape)}, dtype {dtype}, layout {self.layout}"


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages that the stages' graphs send and receive, and those of the plans that start or end there, by end."""

    graphs: Mapping[End, Message]
    plans: Mapping[End, Sequence[Message]]

    def problems(self, edges: Sequence[Edge]) -> dict[Hop, str]:
        """What is wrong with the messages of `edges`, by hop.

        The graphs at both ends must agree on shape and dtype, and each with its plan on the layout, too. If the graphs
        differ, the problem is reported for the receiving end.
        """
        found: dict[Hop, str | None] = {}
        for edge in edges:
            for sending, receiving in _directions(edge):
                source, target = sending[1], receiving[1]
                found[edge.name, source, source] = self._against_plan(sending, sends=True)
                mismatch = self._against_other(sending, receiving) or self._against_plan(receiving, sends=False)
                found[edge.name, source, target] = mismatch
        return {hop: problem for hop, problem in found.items() if problem}

    def _against_plan(self, end: End, *, sends: bool) -> str | None:
        expected, plans = self.graphs[end], self.plans.get(end, ())
        wrong = [plan for plan in plans if plan != expected]
        if plans and not wrong:
            return None
        does = f"is planned with {wrong[0]}" if wrong else "has no plan that moves it"
        return f"{does}: stage {end[1]} {'sends' if sends else 'receives'} {_named(end)} with {expected}"

    def _against_other(self, sending: End, receiving: End) -> str | None:
        given, taken = self.graphs[sending], self.graphs[receiving]
        if (given.shape, given.dtype) == (taken.shape, taken.dtype):
            return None
        expects = f"stage {receiving[1]} expects {_named(receiving)} with {taken}"
        return f"does not fit: {expects}, and found it with {given} from stage {sending[1]}"


def _directions(edge: Edge) -> Iterator[tuple[End, End]]:
    """The sending and the receiving end of its values, then of its gradients."""
    for target in edge.targets:
        yield (edge.name, edge.source, False), (edge.name, target, False)
    for target in edge.targets if edge.differentiable else ():
        yield (edge.name, target, True), (edge.name, edge.source, True)


def _named(end: End) -> str:
    edge, _, is_gradient = end
    return f"{'the gradient of ' if is_gradient else ''}edge {edge}"
