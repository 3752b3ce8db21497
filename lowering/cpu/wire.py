"""Messages of chunks between ranks of different hosts, in threads of their own, apart from the one that multiplies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch.distributed as dist
from torch import Tensor

from fxpar._torch.distributed import process_group_named
from fxpar.errors import PeerLostError
from fxpar.transport.worker import Worker

# Chunks are sent one after another, so that the first arrives before the last is sent; a second one in flight keeps the
# link busy while the first is being acknowledged.
_IN_FLIGHT = 2

# Far above the tags of values between stages. Each piece has a tag of its own, from the first one on, since a rank may
# forward the pieces of others before it has sent its own.
TERM_TAG = 1 << 30
FIRST_PIECE_TAG = TERM_TAG + 1


class Wire:
    """This rank's messages to and from other hosts, in order per direction. Threads start with the first message."""

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name
        self._sender = Worker("fxpar fused ops: send")
        self._receiver = Worker("fxpar fused ops: receive")
        self._in_flight: deque[tuple[dist.Work, int, Tensor]] = deque()
        self._sent: list[Future[None]] = []

    def send(self, memory: Tensor, to: int, tag: int) -> None:
        """Send bytes after all earlier messages; they must not change until `finish`."""
        self._sent.append(self._sender.submit(lambda: self._send(memory, to, tag)))

    def finish(self) -> None:
        """Wait until all messages have been sent.

        Raises:
            PeerLostError: a receiver has ended.
        """
        if self._sent:
            self._sent.append(self._sender.submit(lambda: self._complete(0)))
        sent, self._sent = self._sent, []
        for future in sent:
            future.result()

    def receive(self, memory: Tensor, source: int, tag: int) -> Arrival:
        """Post a receive of bytes from a rank; it must come before any send of the same call."""
        return Arrival(memory, source, tag, self._group_name)

    def follow(self, arrivals: Sequence[Arrival], come: Callable[[int], None], lose: Callable[[int], None]) -> None:
        """Call `come(number)` for each arrival, in order, until one fails; then call `lose(number)` for that one."""
        self._receiver.submit(lambda: _follow(arrivals, come, lose))

    def _send(self, memory: Tensor, to: int, tag: int) -> None:
        self._in_flight.append((_begun(dist.isend, memory, to, tag, self._group_name), to, memory))
        self._complete(_IN_FLIGHT - 1)  # after the isend: an earlier failure must not keep this message from its rank

    def _complete(self, but: int) -> None:
        while len(self._in_flight) > but:
            work, peer, _ = self._in_flight.popleft()
            _complete(work, peer)


class Arrival:
    """A posted receive into `memory`. If it fails, only `wait` raises.

    So a rank that has lost a peer still sends everything to the others, which go on until they need that peer.
    """

    def __init__(self, memory: Tensor, source: int, tag: int, group_name: str) -> None:
        self._source = source
        self._begun: dist.Work | PeerLostError
        try:
            self._begun = _begun(dist.irecv, memory, source, tag, group_name)
        except PeerLostError as error:
            self._begun = error

    def wait(self) -> None:
        """Wait until the bytes are there; to be called once.

        Raises:
            PeerLostError: the sender has ended.
        """
        if isinstance(self._begun, PeerLostError):
            raise self._begun
        _complete(self._begun, self._source)


def _follow(arrivals: Sequence[Arrival], come: Callable[[int], None], lose: Callable[[int], None]) -> None:
    for number, arrival in enumerate(arrivals):
        try:
            arrival.wait()
        except PeerLostError:
            lose(number)
            return
        come(number)


def _begun(move: Callable[..., dist.Work | None], memory: Tensor, peer: int, tag: int, group_name: str) -> dist.Work:
    name = {"group_dst" if move is dist.isend else "group_src": peer}
    try:
        work = move(memory, group=process_group_named(group_name), tag=tag, **name)
    except RuntimeError as error:
        raise PeerLostError("chunks of a fused matmul", peer, str(error)) from error
    assert work is not None, "this rank is in the group"
    return work


def _complete(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLostError("chunks of a fused matmul", peer, str(error)) from error
