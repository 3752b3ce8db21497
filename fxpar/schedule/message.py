"""What the two ends of a message, and the plan that moves it, each believe that it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxpar.schedule.transfer import Edge

End: TypeAlias = tuple[str, int, bool]
"""Edge, stage, and whether it is the edge's gradient: what a stage sends or receives there."""

Hop: TypeAlias = tuple[str, int, int]
"""Edge, and from which stage to which: what the latter receives or, with the former twice, what that sends."""


@dataclass(frozen=True, slots=True)
class Message:
    """One whole value of a microbatch, as one end of an edge has it; `layout` is anything that tells its sharding."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: object

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"shape {list(self.shape)}, dtype {dtype}, layout {self.layout}"


@dataclass(frozen=True, slots=True)
class Messages:
    """What the stages' graphs send and receive, and what each plan that starts or ends there does, by end."""

    graphs: Mapping[End, Message]
    plans: Mapping[End, Sequence[Message]]

    def problems(self, edges: Sequence[Edge]) -> dict[Hop, str]:
        """What is wrong with the messages of `edges`, by where it shows.

        The graphs at both ends must agree on shape and dtype, and each with its plan on the layout, too. What a graph
        receives is held against what the other sends; so it is the receiving end that is wrong where they differ.
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
    """From which end to which its values go, then its gradients."""
    for target in edge.targets:
        yield (edge.name, edge.source, False), (edge.name, target, False)
    for target in edge.targets if edge.differentiable else ():
        yield (edge.name, target, True), (edge.name, edge.source, True)


def _named(end: End) -> str:
    edge, _, is_gradient = end
    return f"{'the gradient of ' if is_gradient else ''}edge {edge}"
