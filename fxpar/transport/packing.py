"""Regions of a tile as dense bytes, as they travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.resharding.plan import Relay
from fxpar.resharding.tile import Tile
from fxpar.resharding.units import UnitTask
from fxpar.transport.buffers import Buffers


def as_bytes(dense: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return dense.view(-1).view(torch.uint8)


def pack(piece: Tensor, held: Tile, region: Tile, memory: Tensor) -> None:
    """Write `region` of a `piece`, which holds the tile `held`, into `memory`."""
    dense = memory.view(piece.dtype).view(region.shape)
    for here, there in held.parts(region):
        dense[there].copy_(piece[here])


def unpack(memory: Tensor, needed: Tile, region: Tile, piece: Tensor) -> None:
    """Write the bytes of `region` to their places in `piece`, which holds the tile `needed`."""
    dense = memory.view(piece.dtype).view(region.shape)
    for here, there in needed.parts(region):
        piece[here].copy_(dense[there])


def packed(piece: Tensor, held: Tile, region: Tile, buffers: Buffers) -> Tensor:
    """The bytes of `region` of a piece: its own memory where that is all of it, in order."""
    if region == held and piece.is_contiguous():
        return as_bytes(piece)
    memory = buffers.take(region.num_elements * piece.itemsize)
    pack(piece, held, region, memory)
    return memory


def packed_relays(
    relays: Sequence[Relay], tasks: Sequence[UnitTask], piece: Tensor, held: Tile, buffers: Buffers
) -> list[Tensor]:
    """The bytes that each of `relays` takes of a piece; relays of one of `tasks` share its region, packed once."""
    regions: dict[int, Tensor] = {}
    memories = []
    for relay in relays:
        if relay.task not in regions:
            regions[relay.task] = packed(piece, held, tasks[relay.task].region, buffers)
        memories.append(regions[relay.task][relay.start * piece.itemsize : relay.stop * piece.itemsize])
    return memories


class Landing:
    """Where the region of one task arrives on a rank that needs it, in one relay or in several."""

    def __init__(self, task: UnitTask, needed: Tile, piece: Tensor, buffers: Buffers) -> None:
        self._task, self._needed, self._piece = task, needed, piece
        self._buffers = buffers
        self._is_direct = task.region == needed and piece.is_contiguous()
        self._memory = as_bytes(piece) if self._is_direct else None
        self._missing = task.num_elements

    def memory(self, relay: Relay) -> Tensor:
        """Bytes that the elements of `relay` may be received into."""
        if self._memory is None:
            self._memory = self._buffers.take(self._task.num_elements * self._piece.itemsize)
        return self._memory[relay.start * self._piece.itemsize : relay.stop * self._piece.itemsize]

    def deliver(self, relay: Relay, arrived: Tensor) -> None:
        """Take the elements of `relay`, which are in `arrived`; with the last of them, the piece has the region."""
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
