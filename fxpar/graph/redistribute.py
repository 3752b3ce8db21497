"""Plan the redistribution of a local value from one layout to another, as changes of placement along one axis each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from fxpar.ir.layout import REPLICATE, Layout, Partial, Placement, Replicate, Shard


class RedistributeKind(IntEnum):
    """What one step does, in the order in which steps run: those that make a value smaller come first."""

    SLICE = 0
    REDUCE_SCATTER = 1
    ALL_TO_ALL = 2
    ALL_REDUCE = 3
    ALL_GATHER = 4
    CONTRIBUTE = 5


@dataclass(frozen=True, slots=True)
class RedistributeStep:
    """One change of placement along `axis`: the value has the layout `before`, and then `after`."""

    axis: str
    before: Layout
    after: Layout

    @property
    def kind(self) -> RedistributeKind:
        """Which operation makes the change."""
        match self.before.placement(self.axis), self.after.placement(self.axis):
            case Replicate(), Shard():
                return RedistributeKind.SLICE
            case Partial(), Shard():
                return RedistributeKind.REDUCE_SCATTER
            case Shard(), Shard():
                return RedistributeKind.ALL_TO_ALL
            case Partial(), Replicate():
                return RedistributeKind.ALL_REDUCE
            case Shard(), Replicate():
                return RedistributeKind.ALL_GATHER
            case Replicate(), Partial():
                return RedistributeKind.CONTRIBUTE
        raise AssertionError(f"no single step leads from {self.before} to {self.after} along {self.axis}")

    def traffic(self, parts: int) -> float:
        """Elements that each of the axis's `parts` ranks sends, with ring algorithms; 0 if nothing is communicated."""
        share = (parts - 1) / parts
        match self.kind:
            case RedistributeKind.ALL_REDUCE:
                return 2 * share * local_size(self.before)
            case RedistributeKind.ALL_GATHER:
                return share * local_size(self.after)
            case RedistributeKind.REDUCE_SCATTER | RedistributeKind.ALL_TO_ALL:
                return share * local_size(self.before)
            case _:
                return 0


def local_size(layout: Layout) -> int:
    """Elements of the largest local piece."""
    held = [digit.size for dim in range(len(layout.shape)) for digit in layout.digits(dim) if digit.axis is None]
    return math.prod(held)


def plan_redistribution(have: Layout, need: Layout) -> list[RedistributeStep]:
    """The steps that lead from `have` to `need`, both of one logical value; none where they are equal.

    Axes change one after another. Where the digit that an axis needs is still held by another axis, that axis is
    gathered first.
    """
    assert have.shape == need.shape, f"a move cannot change the shape: {have} to {need}"
    steps: list[RedistributeStep] = []
    layout = have
    while layout != need:
        steps.append(_next_step(layout, need))
        layout = steps[-1].after
    return steps


def _next_step(layout: Layout, need: Layout) -> RedistributeStep:
    axes = dict.fromkeys(axis for axis, _ in (*layout.axes, *need.axes))
    changing = [axis for axis in axes if layout.placement(axis) != need.placement(axis)]
    direct = [_direct_step(layout, axis, need.placement(axis)) for axis in changing]
    possible = [step for step in direct if step is not None]
    if not possible:
        sharded = [axis for axis in changing if isinstance(layout.placement(axis), Shard)]
        possible = [RedistributeStep(axis, layout, layout.with_placement(axis, REPLICATE)) for axis in sharded]
    return min(possible, key=lambda step: step.kind)


def _direct_step(layout: Layout, axis: str, target: Placement) -> RedistributeStep | None:
    """The step along `axis` to `target`, or as far towards it as one step leads; None if other axes are in the way."""
    current = layout.placement(axis)
    if isinstance(target, Partial) and current != REPLICATE:
        target = REPLICATE
    if isinstance(target, Shard):
        # One shard becomes another in one step only if both digits can be held at once.
        beside = layout if isinstance(current, Shard) else layout.with_placement(axis, REPLICATE)
        if not beside.accepts(target):
            return None
    return RedistributeStep(axis, layout, layout.with_placement(axis, target))


def traffic(steps: list[RedistributeStep], sizes: Mapping[str, int]) -> tuple[float, int]:
    """The cost by which routes are compared: elements sent per rank, then the number of steps."""
    return sum(step.traffic(sizes[step.axis]) for step in steps), len(steps)
