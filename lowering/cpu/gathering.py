"""Pieces that all ranks get to read: in the memory of the rank that has one, or of the one that receives it."""

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
    """A call's part in which each rank publishes its piece, chunk by chunk, and reads those of the others.

    Behind the chunks of a piece goes a seal, a byte that says whether all of them are what their rank published: who
    loses a rank still passes on what others wait for, so that they learn of it.

    Args:
        call: the call, of every rank of the group.
        begin: where in the buffers this may use `num_bytes`.
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
        """What the buffer of any rank needs for it."""
        return max(_begins(hosts, rank, _sealed(room))[None] for rank in range(len(hosts)))

    def own(self, chunk: int) -> Tensor:
        """The memory for a chunk of this rank's piece, bytes, until it is published."""
        return self._memory(self._rank, self._rank, chunk)

    def publish(self, chunk: int) -> None:
        """Let all ranks have a chunk of this rank's piece; those before it must have been published."""
        self._take(self._rank, chunk)
        if chunk + 1 == self._seal(self._rank):
            self.own(chunk + 1).fill_(_INTACT)
            self._take(self._rank, chunk + 1)

    def wait(self, part: int, chunk: int) -> Tensor:
        """A chunk of a piece, bytes, as soon as it is there; it may be read until this rank begins its next call.

        Raises:
            PeerLostError: a rank that it comes from, or through, has ended.
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
        """Let the others of this host have a chunk that is here, and the next host."""
        self._pass_on(part, chunk)
        # Only then: whoever has seen the last has handed over all that this rank sends.
        if chunk == self._seal(part) and self._memory(self._rank, part, chunk).item() != _INTACT:
            self._call.tell_lost(part)
        else:
            self._call.tell_held(part, chunk + 1)

    def _lose(self, part: int, chunk: int) -> None:
        """Let them know that the chunks from this one on will never come."""
        seal = self._seal(part)
        self._memory(self._rank, part, seal).fill_(_BROKEN)
        for rest in range(chunk, seal + 1):
            self._pass_on(part, rest)
        self._call.tell_lost(part)

    def _seal(self, part: int) -> int:
        """The number of the seal, behind all chunks."""
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
    """Where each piece that `rank` holds begins in its buffer, and, by None, where the last of them ends."""
    parts = held(hosts, rank)
    begins = accumulate((room.piece_bytes(part) for part in parts), initial=0)
    return dict(zip([*parts, None], begins, strict=True))


@lru_cache(KEPT)
def _sealed(room: Room) -> Room:
    return Room(tuple((*sizes, 1) if sizes else () for sizes in room.sizes))
