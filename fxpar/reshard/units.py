"""Unit tasks of cross-mesh resharding (Zhuang et al., section 3): which boxes go from which ranks to which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxpar.errors import ReshardError
from fxpar.layout import Box, Layout

Places = Mapping[int, Mapping[str, int]]
"""Rank -> its coordinate (mesh axis -> index), for every rank of a mesh."""


@dataclass(frozen=True, slots=True)
class UnitTask:
    """A box of the tensor that some receivers need and all of `senders` hold; both are ranks."""

    box: Box
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A box that one rank gives to another, or to itself."""

    box: Box
    sender: int
    receiver: int


def unit_tasks(source: Layout, destination: Layout, senders: Places, receivers: Places) -> tuple[UnitTask, ...]:
    """One task per non-empty intersection of a box of a source tile with a box of a destination tile.

    Shards may be uneven and may start inside a dim; such a tile has several boxes.

    Raises:
        ReshardError: the source holds unreduced contributions, or the shapes differ.
    """
    if source.is_partial or destination.is_partial:
        raise ReshardError(f"cannot reshard from {source} to {destination}: expected reduced values; reduce them first")
    if source.shape != destination.shape:
        raise ReshardError(f"cannot reshard from shape {source.shape} to {destination.shape}: expected equal shapes")
    tasks = []
    for needed, takers in _tiles(destination, receivers):
        for held, holders in _tiles(source, senders):
            for box in _intersections(held, needed):
                tasks.append(UnitTask(box, holders, takers))
    return tuple(tasks)


def _tiles(layout: Layout, places: Places) -> list[tuple[tuple[Box, ...], tuple[int, ...]]]:
    """The distinct tiles of a layout, each with the ranks that hold it."""
    holders: dict[tuple[Box, ...], list[int]] = {}
    for rank, coordinate in places.items():
        holders.setdefault(tuple(layout.boxes(coordinate)), []).append(rank)
    return [(boxes, tuple(ranks)) for boxes, ranks in holders.items()]


def _intersections(held: Sequence[Box], needed: Sequence[Box]) -> Iterable[Box]:
    for one in held:
        for other in needed:
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
            if all(start < stop for start, stop in box):
                yield box


def box_size(box: Box) -> int:
    """The number of elements in `box`."""
    return math.prod(stop - start for start, stop in box)


def point_to_point(tasks: Iterable[UnitTask]) -> tuple[Message, ...]:
    """Each receiver's own message for each task.

    A rank that holds the box already is its own sender; otherwise the least loaded of the senders is chosen.
    """
    load: dict[int, int] = {}
    messages = []
    for task in tasks:
        for receiver in task.receivers:
            sender = receiver
            if receiver not in task.senders:
                sender = min(task.senders, key=lambda rank: (load.get(rank, 0), rank))
                load[sender] = load.get(sender, 0) + box_size(task.box)
            messages.append(Message(task.box, sender, receiver))
    return tuple(messages)


def local_slices(box: Box, layout: Layout, coordinate: Mapping[str, int]) -> tuple[slice, ...]:
    """Where `box`, a part of one of the rank's boxes, lies in the rank's local piece."""
    slices = []
    for dim, (start, stop) in enumerate(box):
        offset = 0
        for low, high in layout.ranges(dim, coordinate):
            if low <= start and stop <= high:
                slices.append(slice(offset + start - low, offset + stop - low))
                break
            offset += high - low
        else:
            raise AssertionError(f"{box} is not in the piece of {coordinate} under {layout}")
    return tuple(slices)
