"""Unit tasks of cross-mesh resharding (Zhuang et al., section 3): regions, with their senders and receivers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
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
    tasks = []
    near: dict[_Rows, list[Tile]] = {}
    for needed, takers in _holders(destination).items():
        rows = needed.ranges[:1]
        if rows not in near:
            near[rows] = _near(rows, held)
        for tile in near[rows]:
            region = tile.intersect(needed)
            if region.num_elements:
                tasks.append(UnitTask(region, tuple(held[tile]), tuple(takers)))
    return tuple(tasks)


def _near(rows: _Rows, tiles: Collection[Tile]) -> list[Tile]:
    """The tiles that hold some of `rows`: with many batch shards, these are few of all tiles."""
    distinct = {tile.ranges[:1]: None for tile in tiles}
    meeting = {found for found in distinct if Tile(found).intersect(Tile(rows)).num_elements}
    return [tile for tile in tiles if tile.ranges[:1] in meeting]


def _holders(tiles: Tiles) -> dict[Tile, list[int]]:
    holders: dict[Tile, list[int]] = {}
    for rank, tile in sorted(tiles.items()):
        holders.setdefault(tile, []).append(rank)
    return holders
