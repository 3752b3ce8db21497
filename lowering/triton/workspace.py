"""Symmetric memory of a group's GPUs, which all of them can write to; calls alternate between its two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch import process_group_named, sharable_memory, symmetric_memory

if TYPE_CHECKING:
    from fxpar._torch import SymmetricMemory

_ALIGNMENT_BYTES = 128
_INT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Half:
    """Half of a workspace, for one call.

    epoch: the number of the call, which its signals are set to.
    counted: how many signals each rank sends to this rank in this half, in all calls up to and including this one.
    """

    memory: SymmetricMemory
    epoch: int
    counted: int
    num_signals: int
    offset: int

    def ready(self, rank: int) -> Tensor:
        """(parts,) int32 on `rank`: the latest epoch in which each rank's data was ready to be read."""
        return self._ints(rank)[: self.memory.world_size]

    def counters(self, rank: int) -> Tensor:
        """(parts,) int32 on `rank`: how many signals each rank has sent for data that it stored there."""
        return self._ints(rank)[self.memory.world_size : 2 * self.memory.world_size]

    def signals(self, rank: int) -> Tensor:
        """(num_signals,) int32 on `rank`, one per segment."""
        return self._ints(rank)[2 * self.memory.world_size :]

    def data(self, rank: int, dtype: torch.dtype, *shape: int, start_bytes: int = 0) -> Tensor:
        """A tensor on `rank` that begins `start_bytes` after its signals."""
        start = self.offset + _signal_bytes(self.num_signals, self.memory.world_size) + start_bytes
        return self.memory.get_buffer(rank, shape, dtype, start // dtype.itemsize)

    def _ints(self, rank: int) -> Tensor:
        count = self.num_signals + 2 * self.memory.world_size
        return self.memory.get_buffer(rank, (count,), torch.int32, self.offset // _INT_BYTES)


class Workspace:
    """The symmetric memory of a group: two halves that calls use alternately.

    Every call waits for data from every rank, which that rank sends after its own previous call. So when a call begins,
    all ranks have finished the call before the previous one, whose half it uses: no rank has to wait before it writes
    to others. Signals are epochs, or counts that only grow; none is ever reset.
    """

    def __init__(self, group_name: str, device: torch.device) -> None:
        self.group = process_group_named(group_name)
        self.device = device
        self.rank = self.group.rank()
        self.parts = self.group.size()
        self.copies = torch.cuda.Stream(device, priority=-1)
        self._epoch = 0
        self._take(1, 0)

    def begin(self, num_signals: int, num_bytes: int, counted: int = 0) -> Half:
        """The half of the next call. All ranks begin the same calls in the same order.

        Args:
            num_signals: the number of segments.
            num_bytes: the size of the data.
            counted: the number of signals that this rank will receive from each rank.
        """
        if num_signals > self._num_signals or num_bytes > self._num_bytes:
            self._take(max(num_signals, self._num_signals), max(num_bytes, self._num_bytes))
        self._epoch += 1
        parity = self._epoch % 2
        self._counted[parity] += counted
        offset = parity * self._half_bytes()
        return Half(self._memory, self._epoch, self._counted[parity], self._num_signals, offset)

    def link(self) -> str:
        """How the GPUs access each other's memory: "multicast" or "peer to peer"."""
        return "multicast" if self._memory.multicast_ptr else "peer to peer"

    def renew(self) -> None:
        """Allocate new memory, after a call in which not all signals were set. A collective."""
        self._take(self._num_signals, self._num_bytes)

    def _take(self, num_signals: int, num_bytes: int) -> None:
        """Allocate new memory, once no rank uses the old memory any more. A collective."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        self._num_signals, self._num_bytes, self._counted = num_signals, _aligned(num_bytes), [0, 0]
        size = 2 * self._half_bytes()
        self._memory = symmetric_memory(self._allocated(size), self.group)
        self._memory.get_buffer(self.rank, (size,), torch.uint8).zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def _allocated(self, num_bytes: int) -> Tensor:
        """Memory that can be shared. A collective: if one rank fails, all raise, since sharing needs all of them.

        Raises:
            RuntimeError: a rank has too little memory, or none that others can access.
        """
        memory, failure = None, None
        try:
            memory = sharable_memory(num_bytes, self.device)
        except RuntimeError as error:
            failure = error
        failures = torch.tensor([memory is None], dtype=torch.int32, device=self.device)
        dist.all_reduce(failures, group=self.group)
        if memory is None or failures.item():
            raise RuntimeError(f"not all ranks have {num_bytes} bytes of symmetric memory") from failure
        return memory

    def _half_bytes(self) -> int:
        return _signal_bytes(self._num_signals, self.parts) + self._num_bytes


def _signal_bytes(num_signals: int, parts: int) -> int:
    return _aligned((num_signals + 2 * parts) * _INT_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
