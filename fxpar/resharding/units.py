"""Unit tasks of cross-mesh resharding (Zhuang et al., section 3): regions, with their senders and receivers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from fxpar.resharding.tile import Interval, Tile, Tiles

_Rows: TypeAlias = tuple[tuple[Interval, ...], ...]
"""The intervals of a tile in the first dim; empty for a scalar."""


@dataclass(frozen=True, slots=True)
class UnitTask:
    """A region of the tensor that all of `receivers` need and all of `senders` hold; both are ranks, ascending.

    A rank may be both. The region is sent as a dense tensor of its own shape, in row-major order.
    """

    region: Tile
    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The size of the region."""
        return self.region.num_elements


def unit_tasks(source: Tiles, destination: Tiles) -> tuple[UnitTask, ...]:
    """One task per non-empty intersection of a destination tile with a source tile.

    The paper's text has one per source slice; its case 4 and its lower bounds imply that it counts intersections.
    """
    held = _holders(source)
    near = _Near(held)
    tasks = []
    for needed, takers in _holders(destination).items():
        for tile in near.tiles(needed.ranges[:1]):
            region = tile.intersect(needed)
            if region.num_elements:
                tasks.append(UnitTask(region, tuple(held[tile]), tuple(takers)))
    return tuple(tasks)


class _Near:
    """Finds the tiles that hold some of given rows: with many batch shards, these are few of all tiles."""

    def __init__(self, tiles: Collection[Tile]) -> None:
        self._by_rows: dict[_Rows, list[tuple[int, Tile]]] = {}
        for place, tile in enumerate(tiles):
            self._by_rows.setdefault(tile.ranges[:1], []).append((place, tile))
        spans = [(*_span(rows), rows) for rows in self._by_rows]
        self._spans = sorted(spans)
        self._ends = list(accumulate((stop for _, stop, _ in self._spans), max))
        self._known: dict[_Rows, list[Tile]] = {}

    def tiles(self, rows: _Rows) -> list[Tile]:
        """The tiles with common rows, in the order in which they were given."""
        if rows not in self._known:
            found = [each for meeting in self._meeting(rows) for each in self._by_rows[meeting]]
            self._known[rows] = [tile for _, tile in sorted(found, key=lambda each: each[0])]
        return self._known[rows]

    def _meeting(self, rows: _Rows) -> Iterator[_Rows]:
        start, stop = _span(rows)
        at = bisect_left(self._spans, (stop,))
        while at and self._ends[at - 1] > start:
            at -= 1
            other = self._spans[at][2]
            if Tile(other).intersect(Tile(rows)).num_elements:
                yield other


def _span(rows: _Rows) -> tuple[int, int]:
    """From the first to the last of some rows; of a scalar, and where there are none, one that meets all or none."""
    if not rows:
        return (0, 1)
    return (rows[0][0][0], rows[0][-1][1]) if rows[0] else (0, 0)


def _holders(tiles: Tiles) -> dict[Tile, list[int]]:
    holders: dict[Tile, list[int]] = {}
    for rank, tile in sorted(tiles.items()):
        holders.setdefault(tile, []).append(rank)
    return holders
