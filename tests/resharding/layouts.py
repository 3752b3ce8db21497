"""Random reshardings: two layouts of one shape on two meshes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from hypothesis import strategies as st

from fxpar.ir.layout import Layout, Shard
from fxpar.resharding.tile import Tile, tile_of

Places: TypeAlias = dict[int, dict[str, int]]
"""Rank -> its coordinate."""


@dataclass(frozen=True, slots=True)
class Case:
    """Where a tensor is, and where it shall be."""

    source: Layout
    destination: Layout
    senders: Places
    receivers: Places

    def tiles(self) -> tuple[dict[int, Tile], dict[int, Tile]]:
        """What each rank holds, and what each needs."""
        return tiles(self.source, self.senders), tiles(self.destination, self.receivers)


def tiles(layout: Layout, places: Places) -> dict[int, Tile]:
    """What each rank holds under `layout`."""
    return {rank: tile_of(layout, at) for rank, at in places.items()}


def places(first_rank: int, **sizes: int) -> Places:
    """Ranks in a row, with their coordinates on the axes of the given sizes."""
    coordinates = product(*map(range, sizes.values()))
    return {first_rank + i: dict(zip(sizes, index, strict=True)) for i, index in enumerate(coordinates)}


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], sizes: dict[str, int]) -> Layout:
    """A random layout: even and ragged shards, shards that start inside a dim, two shards in one dim."""
    layout = Layout(shape)
    for axis, parts in sizes.items():
        shards = [Shard(dim, parts, outer) for dim, size in enumerate(shape) for outer in range(1, size + 1)]
        shards = [shard for shard in shards if layout.accepts(shard)]
        if parts > 1 and shards and draw(st.booleans()):
            layout = layout.with_placement(axis, draw(st.sampled_from(shards)))
    return layout


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 12) -> Case:
    """Meshes whose ranks are apart, the same, or partly the same."""
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    meshes = [{"y": draw(st.integers(1, 3)), "x": draw(st.integers(1, max_ranks // 3))} for _ in range(2)]
    source, destination = (draw(layouts(shape, sizes)) for sizes in meshes)
    first = draw(st.integers(0, max_ranks))
    return Case(source, destination, places(0, **meshes[0]), places(first, **meshes[1]))
