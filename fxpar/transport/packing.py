"""Pack regions of a tile to the dense bytes that are sent, and unpack them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.resharding.plan import Relay
from fxpar.resharding.tile import Tile
from fxpar.resharding.units import UnitTask
from fxpar.transport.buffers import Buffers


def as_bytes(dense: Tensor) -> Tensor:
    """A contiguous tensor as a flat uint8 view."""
    return dense.view(-1).view(torch.uint8)


def pack(piece: Tensor, held: Tile, region: Tile, memory: Tensor) -> None:
    """Write `region` of a `piece`, which holds the tile `held`, into `memory`."""
    dense = memory.view(piece.dtype).view(region.shape)
    for here, there in held.parts(region):
        dense[there].copy_(piece[here])


def unpack(memory: Tensor, needed: Tile, region: Tile, piece: Tensor) -> None:
    """Write the bytes of `region` to their positions in `piece`, which holds the tile `needed`."""
    dense = memory.view(piece.dtype).view(region.shape)
    for here, there in needed.parts(region):
        piece[here].copy_(dense[there])


def packed(piece: Tensor, held: Tile, region: Tile, buffers: Buffers) -> Tensor:
    """The bytes of `region` of a piece; a view of the piece, without a copy, if the region is all of it."""
    if region == held and piece.is_contiguous():
        return as_bytes(piece)
    memory = buffers.take(region.num_elements * piece.itemsize)
    pack(piece, held, region, memory)
    return memory


def packed_relays(
    relays: Sequence[Relay], tasks: Sequence[UnitTask], piece: Tensor, held: Tile, buffers: Buffers
) -> list[Tensor]:
    """The bytes of a piece for each of `relays`; relays of the same task share its region, which is packed once."""
    regions: dict[int, Tensor] = {}
    memories = []
    for relay in relays:
        if relay.task not in regions:
            regions[relay.task] = packed(piece, held, tasks[relay.task].region, buffers)
        memories.append(regions[relay.task][relay.start * piece.itemsize : relay.stop * piece.itemsize])
    return memories


class Landing:
    """The memory that the region of one task is received into, by one or several relays, and its unpacking."""

    def __init__(self, task: UnitTask, needed: Tile, piece: Tensor, buffers: Buffers) -> None:
        self._task, self._needed, self._piece = task, needed, piece
        self._buffers = buffers
        self._is_direct = task.region == needed and piece.is_contiguous()
        self._memory = as_bytes(piece) if self._is_direct else None
        self._missing = task.num_elements

    def memory(self, relay: Relay) -> Tensor:
        """The bytes to receive the elements of `relay` into."""
        if self._memory is None:
            self._memory = self._buffers.take(self._task.num_elements * self._piece.itemsize)
        return self._memory[relay.start * self._piece.itemsize : relay.stop * self._piece.itemsize]

    def deliver(self, relay: Relay, arrived: Tensor) -> None:
        """Take the elements of `relay` from `arrived`; after the last relay, the region is written to the piece."""
        self._missing -= relay.num_elements
        if relay.num_elements == self._task.num_elements and not self._is_direct:
            unpack(arrived, self._needed, self._task.region, self._piece)
            return
        memory = self.memory(relay)
        if memory.data_ptr() != arrived.data_ptr():
            memory.copy_(arrived)
        if self._missing == 0 and not self._is_direct:
            assert self._memory is not None, "what arrived in parts was put together"
            unpack(self._memory, self._needed, self._task.region, self._piece)
