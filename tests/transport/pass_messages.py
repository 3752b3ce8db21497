"""What ranks do to pass messages in shared memory; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError, SharedMemoryError
from fxpar.transport.channel import ChannelReader, ChannelRequest, ChannelWriter, open_channels
from fxpar.transport.shared_segment import OwnSegment, PeerSegment, SegmentFile, share_memory

SIZES = (0, 1, 63, 64, 65, 4096, 100_000, 1 << 20, 3_000_001)
NEVER_S = 1000.0  # longer than the ranks may live


def content(writer: int, number: int) -> Tensor:
    """What a message says; of varying size."""
    generator = torch.Generator().manual_seed(1000 * writer + number)
    return torch.randint(0, 256, (SIZES[number % len(SIZES)],), dtype=torch.uint8, generator=generator)


def send(writer: ChannelWriter, data: Tensor) -> None:
    """A message, whole."""
    message = writer.begin(data.numel())
    message.buffer.copy_(data)
    message.publish(data.numel())


def receive(reader: ChannelReader, num_bytes: int) -> Tensor:
    """A copy of the next message, whole."""
    arrival = reader.receive(num_bytes)
    data = arrival.wait(num_bytes, NEVER_S).clone()
    arrival.release()
    return data


class Party:
    """This rank among all, with a channel from each to all others."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        ranks = range(dist.get_world_size())
        others = {rank: tuple(other for other in ranks if other != rank) for rank in ranks}
        channels = open_channels([ChannelRequest(f"the channel of {rank}", rank, others[rank]) for rank in ranks])
        self.writer = channels.writers[f"the channel of {self.rank}"]
        self.readers = {rank: channels.readers[f"the channel of {rank}"] for rank in others[self.rank]}
        self.heap = share_memory().own.heap

    def acknowledge(self) -> None:
        """Tell all others that this rank is as far."""
        send(self.writer, torch.empty(0, dtype=torch.uint8))

    def hear(self, rank: int) -> None:
        """Wait until another rank has acknowledged."""
        receive(self.readers[rank], 0)


def all_to_all(num_messages: int) -> list[tuple[int, int]]:
    """Everyone sends to everyone, without waiting for anyone; returns the messages that arrived changed."""
    party = Party()
    for number in range(num_messages):
        send(party.writer, content(party.rank, number))
    changed = []
    for peer, reader in party.readers.items():
        for number in range(num_messages):
            expected = content(peer, number)
            if not torch.equal(receive(reader, expected.numel()), expected):
                changed.append((peer, number))
    return changed


def lag_behind(num_messages: int, rounds: int) -> list[int]:
    """Rank 0 sends all messages of a round before the others read the first, the last one first.

    Gives rank 0's committed bytes after each round, and the others' messages that arrived changed.
    """
    party = Party()
    if party.rank > 0:
        changed = []
        for _ in range(rounds):
            changed += _read_backwards(party.readers[0], num_messages)
            party.acknowledge()
        return changed
    committed = []
    for _ in range(rounds):
        for number in range(num_messages):
            send(party.writer, content(0, number))
        for peer in party.readers:
            party.hear(peer)
        committed.append(party.heap.committed_bytes)
    return committed


def _read_backwards(reader: ChannelReader, num_messages: int) -> list[int]:
    expected = [content(0, number) for number in range(num_messages)]
    arrivals = [reader.receive(data.numel()) for data in expected]
    changed = []
    for number, arrival in reversed(list(enumerate(arrivals))):
        if not torch.equal(arrival.wait(arrival.num_bytes, NEVER_S), expected[number]):
            changed.append(number)
        arrival.release()
    return changed


def keep_pace(num_messages: int, held: int) -> list[int]:
    """Rank 0 sends to rank 1, of which that holds `held` at any time; returns rank 0's committed bytes after each."""
    party = Party()
    committed = []
    arrivals = []
    for number in range(num_messages):
        if party.rank == 1:
            arrivals.append(party.readers[0].receive(content(0, number).numel()))
            arrivals[-1].wait(0, NEVER_S)
            if number >= held:
                arrivals[number - held].release()
            party.acknowledge()
        else:
            send(party.writer, content(0, number))
            party.hear(1)
            committed.append(party.heap.committed_bytes)
    return committed


def in_pieces(ends: list[int]) -> list[bool]:
    """Rank 0 publishes a message up to each of `ends`, and goes on when the others have that.

    Gives, for each piece, whether it came as it was sent and not a byte more.
    """
    party = Party()
    data = torch.arange(ends[-1], dtype=torch.uint8)
    if party.rank == 0:
        message = party.writer.begin(data.numel())
        message.buffer.copy_(data)
        for end in ends:
            message.publish(end)
            for peer in party.readers:
                party.hear(peer)
        return []
    arrival = party.readers[0].receive(data.numel())
    right = []
    for end in ends:
        is_equal = torch.equal(arrival.wait(end, NEVER_S), data[:end])
        right.append(is_equal and (end == ends[-1] or not _has_come(lambda end=end: arrival.wait(end + 1, 0))))
        party.acknowledge()
    arrival.release()
    return right


def _has_come(wait: Callable[[], Tensor]) -> bool:
    try:
        wait()
    except PeerLostError:
        return False
    return True


def shared_pages() -> tuple[tuple[int, ...], list[int], str]:
    """The ranks whose segments this rank maps, what it reads of each where their rank stands, and its file's name."""
    memory = share_memory()
    assert share_memory() is memory, "made once"
    first = memory.own.allocate(64)
    memory.own.bytes_at(first, 64).fill_(memory.rank)
    dist.barrier()
    read = [int(peer.bytes_at(first, 64)[0]) for peer in memory.peers.values()]
    name = os.readlink(f"/proc/self/fd/{memory.own.found_at.file.fd}")
    return tuple(memory.peers), read, name


def lose_the_writer() -> tuple[str, list[int], str]:
    """A writer is killed while this process sleeps until its message is complete.

    Gives the error, the half that was published, and the state in which the writer's process was left.
    """
    own = OwnSegment()
    with _forked(_write_half, own.found_at) as (child, line):
        where, place = line.recv()
        arrival = ChannelReader("the toy", PeerSegment(5, where), place, 0).receive(8)
        arrival.wait(4, NEVER_S)
        line.send("end yourself")
        try:
            arrival.wait(8, NEVER_S)
            error = "it came"
        except PeerLostError as lost:
            error = str(lost)
        with open(f"/proc/{child}/stat") as stat:
            state = stat.read().rsplit(")", 1)[1].split()[0]
        return error, arrival.wait(4, NEVER_S).tolist(), state


def _write_half(reader: SegmentFile, line: Connection) -> None:
    segment = OwnSegment()
    writer = ChannelWriter("the toy", segment, [PeerSegment(0, reader)])
    message = writer.begin(8)
    message.buffer.copy_(torch.arange(8))
    message.publish(4)
    line.send((segment.found_at, writer.place))
    line.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def lose_the_reader() -> tuple[int, str]:
    """A reader is killed between two messages; returns how many the writer could begin in all, and its error."""
    own = OwnSegment()
    with _forked(_read_one, own.found_at) as (child, line):
        writer = ChannelWriter("the toy", own, [PeerSegment(5, line.recv())])
        line.send(writer.place)
        for _ in range(3):
            send(writer, torch.arange(8, dtype=torch.uint8))
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays unreaped
        for num_begun in range(3, 100):
            try:
                writer.begin(8)
            except PeerLostError as lost:
                return num_begun, str(lost)
    return 100, "never noticed"


def _read_one(writer: SegmentFile, line: Connection) -> None:
    segment = OwnSegment()
    line.send(segment.found_at)
    reader = ChannelReader("the toy", PeerSegment(0, writer), line.recv(), 0)
    receive(reader, 8)
    reader.receive(8).wait(8, NEVER_S)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _forked(behave: Callable[[SegmentFile, Connection], None], where: SegmentFile) -> Iterator[tuple[int, Connection]]:
    """A child that has a segment of its own, which no rank could kill without ending its whole process group."""
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            behave(where, theirs)
        finally:
            os._exit(1)
    theirs.close()
    try:
        yield child, ours
    finally:
        ours.close()
        os.waitpid(child, 0)


def wait_in_vain() -> tuple[str, float, float]:
    """Rank 1 waits for what rank 0 never sends; returns its error, how long it took, and how long it ran of that."""
    party = Party()
    if party.rank == 0:
        return "", 1.0, 0.0
    arrival = party.readers[0].receive(8)
    began, began_running = time.monotonic(), time.thread_time()
    try:
        arrival.wait(8, 0.4)
        error = "it came"
    except PeerLostError as lost:
        error = str(lost)
    return error, time.monotonic() - began, time.thread_time() - began_running


def share_what_one_rank_lacks() -> str:
    """Rank 1 may have no address space for its segment; the error of each rank."""
    if dist.get_rank() == 1:
        (pages, *_) = Path("/proc/self/statm").read_text().split()
        limit = int(pages) * resource.getpagesize() + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        share_memory()
    except SharedMemoryError as error:
        return str(error)
    return "shared"
