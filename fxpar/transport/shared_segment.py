"""Each rank's shared-memory segment, mapped by all ranks of its host, with a check that its process is alive."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.core.kernel_files import memory_file
from fxpar.core.shared_memory import Heap, Signal
from fxpar.errors import PeerLostError, SharedMemoryError
from fxpar.world.hosts import OpenFile, discover_hosts
from fxpar.world.lost_peers import naming_lost_peers

T = TypeVar("T")
P = TypeVar("P")

# Virtual size: a segment never moves as it grows, and takes physical memory only for what was allocated.
SEGMENT_BYTES = 64 << 30
# How long a waiter sleeps before it checks whether its peer is alive, and lets Python handle interrupts.
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """What other processes of the host need to map a segment."""

    file: OpenFile
    num_bytes: int


class Segment:
    """A rank's shared memory, mapped in this process. Positions are offsets, which are the same in every process."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        try:
            self._memory = mmap.mmap(fd, num_bytes)
        except OSError as error:
            raise SharedMemoryError(f"map {num_bytes} bytes", str(error)) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def bytes_at(self, offset: int, num_bytes: int) -> Tensor:
        """A view of the memory at `offset`, uint8 (num_bytes,). The segment stays mapped while such a tensor exists."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=offset)

    def signal_at(self, offset: int) -> Signal:
        """The signal at `offset`; valid only while the segment object is alive."""
        return Signal(self.address + offset)


class OwnSegment(Segment):
    """This rank's segment. Its file has no name, so that nothing is left of it when its processes have ended.

    lock: guards the records that users of the segment have of their blocks; never held while waiting for another rank.
    reclaimers: called, under `lock`, to free blocks before more memory is taken from the kernel.
    """

    def __init__(self, num_bytes: int = SEGMENT_BYTES) -> None:
        fd = memory_file("fxpar")
        finalize(self, os.close, fd).atexit = False
        os.ftruncate(fd, num_bytes)
        super().__init__(fd, num_bytes)
        self.heap = Heap(fd, num_bytes)
        self.lock = RLock()
        self.reclaimers: set[Callable[[], None]] = set()
        self.found_at = SegmentFile(OpenFile.of(fd), num_bytes)

    def allocate(self, num_bytes: int) -> int:
        """The offset of a new block: a multiple of 64, never 0. The content of the block is undefined.

        Raises:
            SharedMemoryError: the segment or the machine has no such memory left.
        """
        with self.lock:
            offset = self.heap.reuse(num_bytes)
            if offset is not None:
                return offset
            for reclaim in tuple(self.reclaimers):
                reclaim()
            return self.heap.allocate(num_bytes)

    def free(self, offset: int) -> None:
        """Let the block at `offset` be reused; no process may access it any more."""
        self.heap.free(offset)


class PeerSegment(Segment):
    """The segment of another rank of this host, whose process is watched; errors name it by its rank in the world.

    Raises:
        PeerLostError: the process has ended.
    """

    def __init__(self, rank: int, where: SegmentFile) -> None:
        self.rank = rank
        try:
            self._process = where.file.watch()
            finalize(self, os.close, self._process).atexit = False
            fd = where.file.open()
        except OSError as error:
            raise PeerLostError("the place of its shared memory", rank, str(error)) from error
        try:
            super().__init__(fd, where.num_bytes)
        finally:
            os.close(fd)

    def is_alive(self) -> bool:
        """Whether the rank's process still runs; a zombie does not."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    def wait(self, signal: Signal, at_least: int, awaited: str, deadline: float) -> None:
        """Sleep until `signal`, which that rank sets, is `at_least` or more, or `deadline` (by time.monotonic()).

        Raises:
            PeerLostError: the rank's process has ended, or the deadline has passed; it names what was `awaited`.
        """
        while not signal.wait(at_least, min(_LOOK_EVERY_S, deadline - time.monotonic())):
            if not self.is_alive() and signal.value < at_least:  # it may have set it before it ended
                raise PeerLostError(awaited, self.rank, "its process has ended")
            if time.monotonic() >= deadline:
                raise PeerLostError(awaited, self.rank, "timed out, although the process is still running")


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The segment of rank `rank`, and those of the other ranks of its host."""

    rank: int
    own: OwnSegment
    peers: Mapping[int, PeerSegment]


def share_memory(group: dist.ProcessGroup | None = None) -> SharedMemory:
    """This rank's segment and those of the other ranks of its host, by rank in `group` (default: all ranks).

    A collective in the first call with a group; later calls return the same segments.

    Raises:
        SharedMemoryError: a rank has not enough address space.
        PeerLostError: a rank of this host has ended.
    """
    group = group or dist.group.WORLD
    assert group is not None, "the default process group must exist"
    if group not in _shared:
        _shared[group] = _share(group)
    return _shared[group]


_shared: WeakKeyDictionary[dist.ProcessGroup, SharedMemory] = WeakKeyDictionary()


def _share(group: dist.ProcessGroup) -> SharedMemory:
    hosts = discover_hosts(group)
    own_rank = dist.get_rank(group)
    own, found_at = allocate_together(OwnSegment, lambda own: own.found_at, group)
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[own_rank] and rank != own_rank]
    peers = {rank: PeerSegment(dist.get_global_rank(group, rank), found_at[rank]) for rank in neighbours}
    return SharedMemory(own_rank, own, peers)


def allocate_together(
    allocate: Callable[[], T], place_of: Callable[[T], P], group: dist.ProcessGroup
) -> tuple[T, list[P]]:
    """This rank's result of `allocate`, and `place_of` the result of each rank; a collective.

    It fails on all ranks of `group` or on none.

    Raises:
        SharedMemoryError: `allocate` failed on a rank.
        PeerLostError: a rank has ended.
    """
    own: T | SharedMemoryError
    try:
        own = allocate()
    except SharedMemoryError as error:
        own = error
    offered: P | str = str(own) if isinstance(own, SharedMemoryError) else place_of(own)
    places: list[Any] = [offered] * dist.get_world_size(group)
    with naming_lost_peers("the places of shared memory"):
        dist.all_gather_object(places, offered, group)
    if isinstance(own, SharedMemoryError):
        raise own
    for rank, place in enumerate(places):
        if isinstance(place, str):
            raise SharedMemoryError("have the part of every rank", f"on rank {rank}: {place}")
    return own, places
