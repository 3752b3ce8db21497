"""The shared memory in which the ranks of a host exchange pieces, and the signals that say which chunks are there.

Every rank of a group makes the same calls in the same order. Calls alternate between two buffers, so that a rank may
fill one while slower ranks still read the other. Nobody still reads the buffer that a call fills: each call needs data
from every rank, directly or through others, so a rank that has finished a call knows that all ranks have begun it, and
so have finished the call before.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from fxpar._torch.distributed import process_group_named
from fxpar.core.shared_memory import Signal
from fxpar.errors import PeerLostError
from fxpar.lowering.cpu.wire import Wire
from fxpar.transport.shared_segment import PeerSegment, Segment, allocate_together, share_memory
from fxpar.world.hosts import discover_hosts

_CELL_BYTES = 64  # a cache line
_BUFFERS = 2
_COUNT_BITS = 16  # low bits of a signal's value: the number of chunks that are there; the others: the call's number
_FAILED = 2**64 - 1  # the value of a signal after a failure: no more chunks will arrive
_GROWTH_BYTES = 1 << 20
_TIMEOUT_S = default_pg_timeout.total_seconds()


@dataclass(frozen=True, slots=True)
class _Place:
    """The offsets of a rank's signals and buffers in its segment."""

    signals: int
    buffers: tuple[int, ...]


class Workspace:
    """This rank's view of the memory that a group shares for its fused ops. One thread at a time may make calls."""

    def __init__(self, group_name: str) -> None:
        group = process_group_named(group_name)
        self.hosts = discover_hosts(group)
        self._group_name = group_name  # not the group, which would keep itself and this alive
        self._memory = share_memory(group)
        self.rank = self._memory.rank
        self.wire = Wire(group_name)
        own = self._memory.own
        self._segments: Mapping[int, Segment] = {self.rank: own, **self._memory.peers}
        num_bytes = 2 * len(self.hosts) * _CELL_BYTES
        self._own_place = _Place(own.allocate(num_bytes), ())
        ctypes.memset(own.address + self._own_place.signals, 0, num_bytes)
        self._places: Sequence[_Place] = ()
        self._capacity = 0
        self.buffers: tuple[Mapping[int, Tensor], ...] = ()
        self._num_calls = 0

    def begin(self, num_bytes: int) -> Call:
        """The next call, in buffers of at least `num_bytes`, which is the same on every rank. All ranks wait for each
        other only if it is more than in any call before.

        Raises:
            PeerLostError: a rank has ended.
            SharedMemoryError: the machine has no such memory left.
        """
        if num_bytes > self._capacity:
            self._grow(-(-num_bytes // _GROWTH_BYTES) * _GROWTH_BYTES)
        self._num_calls += 1
        return Call(self, self._num_calls, self.buffers[self._num_calls % _BUFFERS])

    def _grow(self, capacity: int) -> None:
        own, signals, old = self._memory.own, self._own_place.signals, self._own_place.buffers

        def allocate() -> _Place:
            return _Place(signals, tuple(own.allocate(capacity) for _ in range(_BUFFERS)))

        group = process_group_named(self._group_name)
        self._own_place, self._places = allocate_together(allocate, lambda place: place, group)
        places, self._capacity = self._places, capacity
        self.buffers = tuple(
            {rank: segment.bytes_at(places[rank].buffers[i], capacity) for rank, segment in self._segments.items()}
            for i in range(_BUFFERS)
        )
        for block in old:  # which nobody reads any more, since all ranks have entered this call
            own.free(block)

    def signal(self, rank: int, number: int) -> Signal:
        """A signal that the rank `rank` of this host sets."""
        return self._segments[rank].signal_at(self._places[rank].signals + number * _CELL_BYTES)

    def wait(self, rank: int, number: int, at_least: int, awaited: str) -> None:
        """Sleep until a signal of `rank` is `at_least` or more.

        Raises:
            PeerLostError: the rank's process has ended, or it has itself lost a rank that it waited for.
        """
        signal, segment, deadline = self.signal(rank, number), self._segments[rank], time.monotonic() + _TIMEOUT_S
        if isinstance(segment, PeerSegment):
            segment.wait(signal, at_least, awaited, deadline)
        else:
            while not signal.wait(at_least, deadline - time.monotonic()):  # ends early on interrupts
                if time.monotonic() >= deadline:
                    raise PeerLostError(awaited, rank, "nothing has come in time")
        if signal.value == _FAILED:
            raise PeerLostError(awaited, None, f"rank {rank}, which forwards it on this host, has lost its own peer")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a fused op: the `buffers` of all ranks of this host, by rank, and the signals of its progress.

    Each rank has two signals per part: one counts the chunks of the piece that others may read in the rank's buffer,
    the other the chunks that the rank has added its term to.
    """

    workspace: Workspace
    number: int
    buffers: Mapping[int, Tensor]

    def signal_held(self, part: int, num_chunks: int) -> None:
        """Signal that others may read the first `num_chunks` chunks of a piece in this rank's buffer."""
        self._set(part, num_chunks)

    def signal_added(self, part: int, num_chunks: int) -> None:
        """Signal that this rank has added its term to the first `num_chunks` chunks of the piece of `part`."""
        self._set(len(self.workspace.hosts) + part, num_chunks)

    def signal_lost(self, part: int) -> None:
        """Signal that the rest of a piece will never arrive."""
        self.workspace.signal(self.workspace.rank, part).set(_FAILED)

    def signal_failed(self) -> None:
        """Signal that this rank will add no more terms to any piece."""
        num_ranks = len(self.workspace.hosts)
        for part in range(num_ranks):
            self.workspace.signal(self.workspace.rank, num_ranks + part).set(_FAILED)

    def wait_held(self, rank: int, part: int, num_chunks: int) -> None:
        """Wait until the first chunks of a piece are in the buffer of `rank`; raises as `Workspace.wait`."""
        self.workspace.wait(rank, part, self._value(num_chunks), f"the piece of rank {part} for a fused matmul")

    def wait_added(self, rank: int, part: int, num_chunks: int) -> None:
        """Wait until `rank` has added to the first chunks of the piece of `part`; raises as `Workspace.wait`."""
        number = len(self.workspace.hosts) + part
        self.workspace.wait(rank, number, self._value(num_chunks), f"what rank {rank} adds to a fused matmul")

    def _set(self, number: int, num_chunks: int) -> None:
        self.workspace.signal(self.workspace.rank, number).set(self._value(num_chunks))

    def _value(self, num_chunks: int) -> int:
        assert num_chunks < 1 << _COUNT_BITS, f"{num_chunks} chunks"
        return self.number << _COUNT_BITS | num_chunks


def workspace_of(group_name: str) -> Workspace:
    """This rank's workspace in the group of that name; the first call is a collective of the group.

    Raises:
        SharedMemoryError, PeerLostError: as `share_memory`.
    """
    group = process_group_named(group_name)
    if group not in _workspaces:
        _workspaces[group] = Workspace(group_name)
    return _workspaces[group]


_workspaces: WeakKeyDictionary[dist.ProcessGroup, Workspace] = WeakKeyDictionary()
