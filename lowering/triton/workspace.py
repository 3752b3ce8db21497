"""Symmetric memory of a group's GPUs, which all of them can write to; calls alternate between its two halves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch.distributed import process_group_named, sharable_memory, symmetric_memory

if TYPE_CHECKING:
    from fxpar._torch.distributed import SymmetricMemory

T = TypeVar("T")

_ALIGNMENT_BYTES = 128
_INT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Room:
    """What each rank has in half of a workspace: so many signals and counters, and bytes of data."""

    signals: int
    counters: int
    num_bytes: int

    def __or__(self, other: Room) -> Room:
        """Room for what either has room for."""
        return Room(
            max(self.signals, other.signals),
            max(self.counters, other.counters),
            max(self.num_bytes, other.num_bytes),
        )

    def data_offset(self, parts: int) -> int:
        """Where data begins."""
        return _aligned((parts + self.signals + self.counters) * _INT_BYTES)

    def half_bytes(self, parts: int) -> int:
        """The size of all of it."""
        return self.data_offset(parts) + _aligned(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Half:
    """Half of a workspace, for one call. epoch: the number of the call, which its signals are set to."""

    memory: SymmetricMemory
    epoch: int
    room: Room
    offset: int

    def ready(self, rank: int) -> Tensor:
        """(parts,) int32 on `rank`: the latest epoch in which each rank's data was ready to be read."""
        return self._ints(rank, 0, self.memory.world_size)

    def signals(self, rank: int) -> Tensor:
        """(room.signals,) int32 on `rank`, one per segment: the latest epoch in which it was copied there."""
        return self._ints(rank, self.memory.world_size, self.room.signals)

    def counters(self, rank: int) -> Tensor:
        """(room.counters,) int32 on `rank`, which are 0 before and after each call: signals for data stored there."""
        return self._ints(rank, self.memory.world_size + self.room.signals, self.room.counters)

    def data(self, rank: int, dtype: torch.dtype, *shape: int, start_bytes: int = 0) -> Tensor:
        """A tensor on `rank` that begins `start_bytes` after the start of the data."""
        start = self.offset + self.room.data_offset(self.memory.world_size) + start_bytes
        return self.memory.get_buffer(rank, shape, dtype, start // dtype.itemsize)

    def _ints(self, rank: int, start: int, count: int) -> Tensor:
        return self.memory.get_buffer(rank, (count,), torch.int32, self.offset // _INT_BYTES + start)


class Workspace:
    """The symmetric memory of a group: two halves that calls use alternately.

    Every call waits for data from every rank, which that rank sends after its own previous call. So when a call begins,
    all ranks have finished the call before the previous one, whose half it uses: no rank has to wait before it writes
    to others. Signals are epochs, which are never reset. Counters are reset by the call that has waited for them.

    tickets: of the kernels that run on this rank's current stream (see `Arrival`).
    """

    def __init__(self, group_name: str, device: torch.device) -> None:
        self.group = process_group_named(group_name)
        self.device = device
        self.rank = self.group.rank()
        self.parts = self.group.size()
        self.copies = torch.cuda.Stream(device, priority=-1)
        self._epoch = 0
        self._take(Room(1, 1, 0))

    def begin(self, num_bytes: int, *, signals: int = 0, counters: int = 0) -> Half:
        """The half of the next call, with room for so much. All ranks begin the same calls in the same order."""
        room = self._room | Room(signals, counters, num_bytes)
        if room != self._room:
            self._take(room)
        self._epoch += 1
        offset = self._epoch % 2 * room.half_bytes(self.parts)
        return Half(self._memory, self._epoch, room, offset)

    def prepared(self, half: Half, kind: type[T], like: Tensor, how: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns for this half, and for tensors like `like`: made once, since it takes the CPU time."""
        key = half.offset, kind, like.shape, like.dtype, how
        if key not in self._prepared:
            self._prepared[key] = make()
        found = self._prepared[key]
        assert isinstance(found, kind), f"expected {kind}, found {type(found)}"
        return found

    def link(self) -> str:
        """How the GPUs access each other's memory: "multicast" or "peer to peer"."""
        return "multicast" if self._memory.multicast_ptr else "peer to peer"

    def renew(self) -> None:
        """Allocate new memory, after a call in which not all signals were set. A collective."""
        self._take(self._room)

    def _take(self, room: Room) -> None:
        """Allocate new memory, once no rank uses the old memory any more. A collective."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        self._room, size = room, 2 * room.half_bytes(self.parts)
        self._memory = symmetric_memory(self._allocated(size), self.group)
        self._memory.get_buffer(self.rank, (size,), torch.uint8).zero_()
        self._prepared: dict[Hashable, Any] = {}
        self.tickets = torch.zeros(1, dtype=torch.int32, device=self.device)
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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
