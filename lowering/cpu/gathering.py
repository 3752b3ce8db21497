"""Pieces that all ranks read: in the memory of their owner, or of the rank that receives them for its host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import accumulate

from torch import Tensor

from fxpar.lowering.cpu.pieces import KEPT, Room
from fxpar.lowering.cpu.ring import held, holder, receiver, sender
from fxpar.lowering.cpu.wire import FIRST_PIECE_TAG
from fxpar.lowering.cpu.workspace import Call

_INTACT, _BROKEN = 0, 1  # what a seal says


class Gathering:
    """The all-gather of a call: each rank publishes its piece, chunk by chunk, and reads those of the others.

    After the chunks of a piece follows a seal, a byte that says whether all chunks are intact. A rank that loses its
    sender still forwards the rest of the piece, with a broken seal, so that ranks that wait for it learn of the loss.

    Args:
        call: the call, of every rank of the group.
        begin: the offset in the buffers of the `num_bytes` that this may use.
        room: of the pieces of all ranks.
    """

    def __init__(self, call: Call, begin: int, room: Room) -> None:
        self._call = call
        self._begin = begin
        self._room = _sealed(room)
        self._hosts, self._rank = call.workspace.hosts, call.workspace.rank
        self._receive()

    @staticmethod
    def num_bytes(hosts: tuple[int, ...], room: Room) -> int:
        """The bytes that it needs in the buffer of every rank."""
        return max(_begins(hosts, rank, _sealed(room))[None] for rank in range(len(hosts)))

    def own(self, chunk: int) -> Tensor:
        """The memory for a chunk of this rank's piece, as bytes; to be filled before `publish`."""
        return self._memory(self._rank, self._rank, chunk)

    def publish(self, chunk: int) -> None:
        """Make a chunk of this rank's piece visible to all ranks; earlier chunks must have been published."""
        self._take(self._rank, chunk)
        if chunk + 1 == self._seal(self._rank):
            self.own(chunk + 1).fill_(_INTACT)
            self._take(self._rank, chunk + 1)

    def wait(self, part: int, chunk: int) -> Tensor:
        """Wait for a chunk of a piece; returns its bytes, which may be read until this rank begins its next call.

        Raises:
            PeerLostError: the owner of the piece, or a rank that forwards it, has ended.
        """
        rank = holder(self._hosts, part, self._hosts[self._rank])
        if part != self._rank:
            is_last = chunk + 1 == self._seal(part)
            self._call.wait_held(rank, part, chunk + 1 + is_last)
        return self._memory(rank, part, chunk)

    def _receive(self) -> None:
        wire = self._call.workspace.wire
        _, *others = held(self._hosts, self._rank)
        arrivals = {
            part: [
                wire.receive(
                    self._memory(self._rank, part, chunk), sender(self._hosts, part, self._rank), FIRST_PIECE_TAG + part
                )
                for chunk in range(len(self._room.sizes[part]))
            ]
            for part in others
        }
        for part, of_part in arrivals.items():
            wire.follow(of_part, partial(self._take, part), partial(self._lose, part))

    def _take(self, part: int, chunk: int) -> None:
        """Forward a chunk that has arrived to the next host, and signal it to the other ranks of this host."""
        self._pass_on(part, chunk)
        # The signal comes last: when this rank's `wait` has seen that of the last chunk, all its sends are queued.
        if chunk == self._seal(part) and self._memory(self._rank, part, chunk).item() != _INTACT:
            self._call.signal_lost(part)
        else:
            self._call.signal_held(part, chunk + 1)

    def _lose(self, part: int, chunk: int) -> None:
        """Signal and forward that the chunks from this one on will never arrive."""
        seal = self._seal(part)
        self._memory(self._rank, part, seal).fill_(_BROKEN)
        for rest in range(chunk, seal + 1):
            self._pass_on(part, rest)
        self._call.signal_lost(part)

    def _seal(self, part: int) -> int:
        """The index of the seal, which follows all chunks."""
        return len(self._room.sizes[part]) - 1

    def _pass_on(self, part: int, chunk: int) -> None:
        following = receiver(self._hosts, part, self._rank)
        if following is not None:
            self._call.workspace.wire.send(self._memory(self._rank, part, chunk), following, FIRST_PIECE_TAG + part)

    def _memory(self, rank: int, part: int, chunk: int) -> Tensor:
        """The bytes of a chunk in the buffer of `rank`, which holds it."""
        begin = self._begin + _begins(self._hosts, rank, self._room)[part] + self._room.offset(part, chunk)
        return self._call.buffers[rank][begin : begin + self._room.sizes[part][chunk]]


@lru_cache(KEPT)
def _begins(hosts: tuple[int, ...], rank: int, room: Room) -> Mapping[int | None, int]:
    """The offset of each piece that `rank` holds in its buffer; under the key None, the end of the last one."""
    parts = held(hosts, rank)
    begins = accumulate((room.piece_bytes(part) for part in parts), initial=0)
    return dict(zip([*parts, None], begins, strict=True))


@lru_cache(KEPT)
def _sealed(room: Room) -> Room:
    return Room(tuple((*sizes, 1) if sizes else () for sizes in room.sizes))
