"""Messages from one rank to others of its host, in order, through shared memory; the writer never waits.

A channel is a linked list in the writer's shared-memory segment: the descriptor of each message says where its bytes
are, how many are ready, and where the next descriptor is. So any number of messages can be in flight.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from fxpar.core.shared_memory import SIGNAL_BYTES
from fxpar.errors import PeerLostError, PlanMismatchError
from fxpar.transport.shared_segment import OwnSegment, PeerSegment, Segment, share_memory

_CELL_BYTES = 64  # a cache line, so that different ranks never write to the same one
_FAILED = 2**64 - 1  # stands for the number of ready bytes, if the rest of the message will never come


class _Cell(ctypes.Structure):
    """The memory layout of a descriptor."""

    block: int
    num_bytes: int
    _fields_: ClassVar = [
        ("ready", ctypes.c_byte * SIGNAL_BYTES),
        ("next", ctypes.c_byte * SIGNAL_BYTES),
        ("block", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
    ]


class _Descriptor:
    """A node of the list: signals `ready` (in bytes) and `next` (an offset), and the message's offset and size."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self.offset = offset
        self.ready = segment.signal_at(offset + _Cell.ready.offset)
        self.next = segment.signal_at(offset + _Cell.next.offset)
        self.cell = _Cell.from_address(segment.address + offset)


@dataclass(frozen=True, slots=True)
class ChannelPlace:
    """The offsets of a channel's cells in its writer's segment.

    first: the head of the list, which links to the first message.
    released: for each reader, a signal that counts the messages, from the first on, that it has released.
    """

    first: int
    released: tuple[int, ...]


class ChannelMessage:
    """A message being written: readers see the published part of `buffer`, uint8 (num_bytes,).

    Only one thread at a time may publish it; it need not be the thread that began it.
    """

    def __init__(self, number: int, buffer: Tensor, descriptor: _Descriptor, previous: int) -> None:
        self.number = number
        self.buffer = buffer
        self.descriptor = descriptor
        self.previous = previous  # the offset of the previous descriptor
        self.num_published = 0
        self.is_over = buffer.numel() == 0

    def publish(self, num_bytes: int) -> None:
        """Let the readers see the first `num_bytes`, which must not change afterwards."""
        assert self.num_published <= num_bytes <= self.buffer.numel(), (
            f"message {self.number} of {self.buffer.numel()} bytes: {num_bytes} published after {self.num_published}"
        )
        if not self.is_over:
            self.descriptor.ready.set(num_bytes)
            self.num_published = num_bytes
            self.is_over = num_bytes == self.buffer.numel()  # last: now others may free the descriptor

    def fail(self) -> None:
        """Tell the readers that the rest of the message will never come; does nothing if all is published."""
        if not self.is_over:
            self.descriptor.ready.set(_FAILED)
            self.is_over = True


def _zeroed_cell(segment: OwnSegment) -> int:
    offset = segment.allocate(_CELL_BYTES)
    ctypes.memset(segment.address + offset, 0, _CELL_BYTES)
    return offset


class ChannelWriter:
    """The writer's end of a channel; thread-safe."""

    def __init__(self, name: str, segment: OwnSegment, readers: Sequence[PeerSegment]) -> None:
        assert readers, f"{name} has no readers"
        self._name = name
        self._segment = segment
        self._readers = readers
        self.place = ChannelPlace(_zeroed_cell(segment), tuple(_zeroed_cell(segment) for _ in readers))
        self._released = [segment.signal_at(offset) for offset in self.place.released]
        self._last = _Descriptor(segment, self.place.first)
        self._num_begun = 0
        self._outstanding: deque[ChannelMessage] = deque()

    def begin(self, num_bytes: int) -> ChannelMessage:
        """A new message, where possible in memory of released ones. Never waits for readers.

        Raises:
            PeerLostError: a reader ended before it had released what was sent.
            SharedMemoryError: the readers are so far behind that memory is exhausted.
        """
        with self._segment.lock:
            self._reclaim()
            self._check_readers()
            descriptor = _Descriptor(self._segment, _zeroed_cell(self._segment))
            block = self._segment.allocate(num_bytes)
            descriptor.cell.block, descriptor.cell.num_bytes = block, num_bytes
            buffer = self._segment.bytes_at(block, num_bytes)
            message = ChannelMessage(self._num_begun, buffer, descriptor, self._last.offset)
            self._last.next.set(descriptor.offset)
            self._last = descriptor
            self._num_begun += 1
            self._outstanding.append(message)
            self._segment.reclaimers.add(self._reclaim)
            return message

    def _reclaim(self) -> None:
        """Free the messages that all readers have released; called under the segment's lock."""
        num_released = min(released.value for released in self._released)
        while self._outstanding and self._outstanding[0].number < num_released and self._outstanding[0].is_over:
            message = self._outstanding.popleft()
            self._segment.free(message.descriptor.cell.block)
            if message.previous != self.place.first:  # the readers found this message, so none follows the link to it
                self._segment.free(message.previous)
        if not self._outstanding:
            self._segment.reclaimers.discard(self._reclaim)

    def _check_readers(self) -> None:
        if not self._outstanding:
            return
        oldest = self._outstanding[0].number
        for reader, released in zip(self._readers, self._released, strict=True):
            if released.value <= oldest and not reader.is_alive():
                raise PeerLostError(f"message {oldest} of {self._name}", reader.rank, "its process has ended")


class ChannelReader:
    """The end of a channel of reader number `index`; thread-safe."""

    def __init__(self, name: str, writer: PeerSegment, place: ChannelPlace, index: int) -> None:
        self.name = name
        self.writer = writer
        self._lock = Lock()
        self._num_received = 0
        self._released = writer.signal_at(place.released[index])
        self._num_released = 0
        self._released_early: set[int] = set()
        self._following = Lock()
        self._last = _Descriptor(writer, place.first)
        self._num_found = 0
        self._found: dict[int, _Descriptor] = {}

    def receive(self, num_bytes: int) -> Arrival:
        """A handle of the next message, which has `num_bytes` by the plan.

        Several handles may be open; they may be waited for in any order. Every message must be received and released.
        """
        with self._lock:
            arrival = Arrival(self, self._num_received, num_bytes)
            self._num_received += 1
            return arrival

    def find(self, number: int, awaited: str, deadline: float) -> _Descriptor:
        """Wait until a message has begun, and return its descriptor; raises as `PeerSegment.wait`.

        The message must not have been released.
        """
        while number not in self._found:
            # One thread at a time: a descriptor is freed once the message after it is released, so no other thread may
            # be waiting for its `next`.
            if not self._following.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise PeerLostError(awaited, self.writer.rank, "another thread waits for a message before it")
            try:
                if number not in self._found:
                    assert number >= self._num_found, f"{awaited} was released"
                    self._follow(awaited, deadline)
            finally:
                self._following.release()
        return self._found[number]

    def _follow(self, awaited: str, deadline: float) -> None:
        self.writer.wait(self._last.next, 1, awaited, deadline)
        self._last = _Descriptor(self.writer, self._last.next.value)
        self._found[self._num_found] = self._last
        self._num_found += 1

    def release(self, number: int) -> None:
        """Release message `number`; the writer is told once all messages before it are released, too."""
        with self._lock:
            found = self._found.pop(number, None)
            assert found is not None, f"message {number} of {self.name} was released before, or never waited for"
            self._released_early.add(number)
            while self._num_released in self._released_early:
                self._released_early.remove(self._num_released)
                self._num_released += 1
            self._released.set(self._num_released)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message of `num_bytes` to be read. It must not be released while another thread waits for it."""

    channel: ChannelReader
    number: int
    num_bytes: int

    def wait(self, num_bytes: int, timeout_s: float) -> Tensor:
        """Wait for the first `num_bytes`: a view of the shared memory, uint8 (num_bytes,), valid until `release`.

        Raises:
            PeerLostError: the writer has ended or failed, or they were not ready after `timeout_s`.
            PlanMismatchError: the writer's message has another size.
        """
        assert num_bytes <= self.num_bytes, f"{num_bytes} of {self.num_bytes} bytes"
        awaited = f"message {self.number} of {self.channel.name}"
        writer, deadline = self.channel.writer, time.monotonic() + timeout_s
        descriptor = self.channel.find(self.number, awaited, deadline)
        cell = descriptor.cell
        if cell.num_bytes != self.num_bytes:
            raise PlanMismatchError(
                f"{awaited}: rank {writer.rank} sends {cell.num_bytes} bytes, this rank expects {self.num_bytes}"
            )
        writer.wait(descriptor.ready, num_bytes, awaited, deadline)
        if descriptor.ready.value == _FAILED:
            raise PeerLostError(awaited, writer.rank, "it cannot send the rest")
        return writer.bytes_at(cell.block, num_bytes)

    def release(self) -> None:
        """Let the writer reuse the memory; the message must have been waited for."""
        self.channel.release(self.number)


@dataclass(frozen=True, slots=True)
class ChannelRequest:
    """A channel to open: its unique name, its writer and readers (ranks of one host)."""

    name: str
    writer: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Channels:
    """This rank's ends of channels, by name."""

    writers: Mapping[str, ChannelWriter]
    readers: Mapping[str, ChannelReader]


def open_channels(requests: Sequence[ChannelRequest], group: dist.ProcessGroup | None = None) -> Channels:
    """This rank's ends of the channels. A collective, with the same requests on every rank, unless there are none.

    The cells of a channel are never freed: one, and one more per reader.

    Raises:
        SharedMemoryError, PeerLostError: as `share_memory`.
    """
    if not requests:
        return Channels({}, {})
    memory = share_memory(group)
    writers = {
        request.name: ChannelWriter(request.name, memory.own, [memory.peers[reader] for reader in request.readers])
        for request in requests
        if request.writer == memory.rank
    }
    places = {name: writer.place for name, writer in writers.items()}
    places_of = [places] * dist.get_world_size(group)
    dist.all_gather_object(places_of, places, group)
    readers = {
        request.name: ChannelReader(
            request.name,
            memory.peers[request.writer],
            places_of[request.writer][request.name],
            request.readers.index(memory.rank),
        )
        for request in requests
        if memory.rank in request.readers
    }
    return Channels(writers, readers)
