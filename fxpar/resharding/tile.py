"""Tiles: the part of a tensor that each rank holds, for any kind of sharding."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from fxpar._torch.distributed import StridedShard
from fxpar.ir.layout import Layout

Interval: TypeAlias = tuple[int, int]
"""Half-open, in logical indices of one dim."""

Slices: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a tensor that one rank holds: the product of each dim's half-open intervals, in local order.

    Intervals are ascending, not adjacent, and not empty; a dim of which nothing is held has none.
    """

    ranges: tuple[tuple[Interval, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local piece."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.ranges)

    @property
    def num_elements(self) -> int:
        """How many elements the piece has."""
        return math.prod(self.shape)

    def intersect(self, other: Tile) -> Tile:
        """The part that both hold."""
        return Tile(tuple(_common(mine, theirs) for mine, theirs in zip(self.ranges, other.ranges, strict=True)))

    def parts(self, region: Tile) -> list[tuple[Slices, Slices]]:
        """The contiguous parts of `region`, which this tile covers: slices of the local piece, and of the region."""
        by_dim = [_runs(mine, theirs) for mine, theirs in zip(self.ranges, region.ranges, strict=True)]
        return [(tuple(here for here, _ in runs), tuple(there for _, there in runs)) for runs in product(*by_dim)]

    def __str__(self) -> str:
        dims = ("+".join(f"{start}:{stop}" for start, stop in intervals) or "-" for intervals in self.ranges)
        return f"[{', '.join(dims)}]"


Tiles: TypeAlias = Mapping[int, Tile]
"""Rank -> tile, for every rank that takes part."""


def tile_of(layout: Layout, coordinate: Mapping[str, int]) -> Tile:
    """The tile of the rank at `coordinate` (mesh axis -> index) under `layout`; partial axes are ignored."""
    return Tile(tuple(_joined(layout.ranges(dim, coordinate)) for dim in range(len(layout.shape))))


def tiles_of_placements(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> dict[int, Tile]:
    """The tile of each rank of `mesh`, for a DTensor of `shape` without partial values.

    As in DTensor, the axes of the mesh shard one after another, each as torch.chunk does.
    """
    tiles = {}
    for index in product(*map(range, mesh.shape)):
        held: list[tuple[Interval, ...]] = [((0, size),) if size else () for size in shape]
        for place, count, placement in zip(index, mesh.shape, placements, strict=True):
            if isinstance(placement, Shard | StridedShard):
                dim = placement.dim % len(shape)
                leading = placement.split_factor if isinstance(placement, StridedShard) else 1
                held[dim] = _chunk(held[dim], place, count, int(leading))
        tiles[int(mesh.mesh[index])] = Tile(tuple(held))
    return tiles


def _chunk(held: Sequence[Interval], place: int, count: int, leading: int) -> tuple[Interval, ...]:
    """Chunk `place` of `count` of each of `leading` chunks, all cut as torch.chunk does."""
    groups = [_cut(held, number, leading) for number in range(leading)]
    return _joined([interval for group in groups for interval in _cut(group, place, count)])


def _cut(held: Sequence[Interval], number: int, count: int) -> list[Interval]:
    """Chunk `number` of `count` of the intervals `held`."""
    width = -(-sum(stop - start for start, stop in held) // count)
    cut, position = [], 0
    for start, stop in held:
        low, high = max(number * width - position, 0), min((number + 1) * width - position, stop - start)
        if low < high:
            cut.append((start + low, start + high))
        position += stop - start
    return cut


def _joined(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _common(mine: Sequence[Interval], theirs: Sequence[Interval]) -> tuple[Interval, ...]:
    """The intersection; both arguments are ascending, so one pass finds it."""
    found = []
    i = j = 0
    while i < len(mine) and j < len(theirs):
        start, stop = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
        if start < stop:
            found.append((start, stop))
        if mine[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def _runs(mine: Sequence[Interval], theirs: Sequence[Interval]) -> list[tuple[slice, slice]]:
    """The longest runs of `theirs` that are contiguous in both, as local slices of mine and of theirs."""
    offsets = list(accumulate((stop - start for start, stop in mine), initial=0))
    runs: list[tuple[slice, slice]] = []
    there = 0
    for start, stop in theirs:
        home = bisect_right(mine, start, key=lambda interval: interval[0]) - 1
        assert home >= 0 and stop <= mine[home][1], f"{start}:{stop} is not in {mine}"
        here, length = offsets[home] + start - mine[home][0], stop - start
        first_here, first_there = here, there
        if runs and runs[-1][0].stop == here:
            before_here, before_there = runs.pop()
            first_here, first_there = before_here.start, before_there.start
        runs.append((slice(first_here, here + length), slice(first_there, there + length)))
        there += length
    return runs
