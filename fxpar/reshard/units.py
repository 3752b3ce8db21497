"""Unit tasks of cross-mesh resharding (Zhuang et al., section 3): what goes from which ranks to which."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.reshard.tile import Tile, Tiles


@dataclass(frozen=True, slots=True)
class UnitTask:
    """A region of the tensor that all of `receivers` need and all of `senders` hold; both are ranks, ascending.

    A rank may be both. The region travels as a dense tensor of its own shape, in row-major order.
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

    The paper's text has one per source slice; by its case 4, and by its lower bounds, it counts intersections.
    """
    held = _holders(source)
    tasks = []
    for needed, takers in _holders(destination).items():
        for tile, holders in held.items():
            region = tile.intersect(needed)
            if region.num_elements:
                tasks.append(UnitTask(region, tuple(holders), tuple(takers)))
    return tuple(tasks)


def _holders(tiles: Tiles) -> dict[Tile, list[int]]:
    holders: dict[Tile, list[int]] = {}
    for rank, tile in sorted(tiles.items()):
        holders.setdefault(tile, []).append(rank)
    return holders
