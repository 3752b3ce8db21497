"""The memory in which the ranks of a host exchange pieces, call after call, and the signals that say what is there.

Every rank of a group makes the same calls in the same order. Two buffers take turns, so that a rank may fill one for a
call while slower ones still read the other. It never meets a reader of the call before that: each call needs something
from every rank, directly or through others, so whoever has finished a call knows that all have begun it, and thus are
done with the one before.
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

from fxpar._torch import process_group_named
from fxpar.core.shared_memory import Signal
from fxpar.errors import PeerLostError
from fxpar.lowering.cpu.wire import Wire
from fxpar.transport.shared_segment import PeerSegment, Segment, allocate_together, share_memory
from fxpar.world.hosts import discover_hosts

_CELL_BYTES = 64  # a cache line
_BUFFERS = 2
_COUNT_BITS = 16  # of a signal's value: how many chunks are there; those above are the call's number
_FAILED = 2**64 - 1  # a signal's value when nothing more will come
_GROWTH_BYTES = 1 << 20
_TIMEOUT_S = default_pg_timeout.total_seconds()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank's signals and buffers are in its segment."""

    signals: int
    buffers: tuple[int, ...]


class Workspace:
    """A rank's part of what a group shares for its fused ops. One thread at a time may make calls."""

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
        """The next call, in buffers of `num_bytes` or more: as many on every rank. All ranks wait for each other only
        when that is more than ever before.

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
        for block in old:  # which nobody reads any more, since all ranks have come here
            own.free(block)

    def signal(self, rank: int, number: int) -> Signal:
        """A signal that the rank `rank` of this host sets."""
        return self._segments[rank].signal_at(self._places[rank].signals + number * _CELL_BYTES)

    def wait(self, rank: int, number: int, at_least: int, awaited: str) -> None:
        """Sleep until a signal of `rank` is `at_least` or more.

        Raises:
            PeerLostError: the rank's process has ended, or it has lost one that it waited for itself.
        """
        signal, segment, deadline = self.signal(rank, number), self._segments[rank], time.monotonic() + _TIMEOUT_S
        if isinstance(segment, PeerSegment):
            segment.wait(signal, at_least, awaited, deadline)
        else:
            while not signal.wait(at_least, deadline - time.monotonic()):  # ends early on interrupts
                if time.monotonic() >= deadline:
                    raise PeerLostError(awaited, rank, "nothing has come in time")
        if signal.value == _FAILED:
            raise PeerLostError(awaited, None, f"rank {rank}, from which it comes on this host, has lost another one")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a fused op: `buffers` of all ranks of this host, by rank, and what has been signalled in it.

    Each rank has two signals for each part: one for pieces that others may read in its own buffer, and one for those
    that it has added its term to.
    """

    workspace: Workspace
    number: int
    buffers: Mapping[int, Tensor]

    def tell_held(self, part: int, num_chunks: int) -> None:
        """Let others read the first chunks of a piece in this rank's buffer."""
        self._set(part, num_chunks)

    def tell_added(self, part: int, num_chunks: int) -> None:
        """Let others add to the first chunks of the piece of `part`, to which this rank has."""
        self._set(len(self.workspace.hosts) + part, num_chunks)

    def tell_lost(self, part: int) -> None:
        """Let others know that the rest of a piece will never come."""
        self.workspace.signal(self.workspace.rank, part).set(_FAILED)

    def tell_none_added(self) -> None:
        """Let others know that this rank will add no more to any piece."""
        num_ranks = len(self.workspace.hosts)
        for part in range(num_ranks):
            self.workspace.signal(self.workspace.rank, num_ranks + part).set(_FAILED)

    def wait_held(self, rank: int, part: int, num_chunks: int) -> None:
        """Until the first chunks of a piece are in the buffer of `rank`; raises as `Workspace.wait`."""
        self.workspace.wait(rank, part, self._value(num_chunks), f"the piece of rank {part} for a fused matmul")

    def wait_added(self, rank: int, part: int, num_chunks: int) -> None:
        """Until `rank` has added to the first chunks of the piece of `part`; raises as `Workspace.wait`."""
        number = len(self.workspace.hosts) + part
        self.workspace.wait(rank, number, self._value(num_chunks), f"what rank {rank} adds to a fused matmul")

    def _set(self, number: int, num_chunks: int) -> None:
        self.workspace.signal(self.workspace.rank, number).set(self._value(num_chunks))

    def _value(self, num_chunks: int) -> int:
        assert num_chunks < 1 << _COUNT_BITS, f"{num_chunks} chunks"
        return self.number << _COUNT_BITS | num_chunks


def workspace_of(group_name: str) -> Workspace:
    """This rank's workspace in a group, by the group's name; a collective the first time.

    Raises:
        SharedMemoryError, PeerLostError: as `share_memory`.
    """
    group = process_group_named(group_name)
    if group not in _workspaces:
        _workspaces[group] = Workspace(group_name)
    return _workspaces[group]


_workspaces: WeakKeyDictionary[dist.ProcessGroup, Workspace] = WeakKeyDictionary()
