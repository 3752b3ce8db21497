"""Terms that every rank computes for every other: straight in the owner's memory, or sent there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxpar.core.sum import add_up
from fxpar.lowering.cpu.pieces import Room
from fxpar.lowering.cpu.ring import after
from fxpar.lowering.cpu.wire import TERM_TAG, Arrival
from fxpar.lowering.cpu.workspace import Call


class Scattering:
    """A call's part in which each rank writes a term of the piece of every rank, chunk by chunk.

    In the buffer of a rank lie the terms of its own piece, in the order of ranks, and then what it computes for ranks
    of other hosts.

    Args:
        call: the call, of every rank of the group.
        begin: where in the buffers this may use `num_bytes`.
        room: of the pieces of all ranks.
    """

    def __init__(self, call: Call, begin: int, room: Room) -> None:
        self._call = call
        self._begin = begin
        self._room = room
        self._hosts, self._rank = call.workspace.hosts, call.workspace.rank
        self._away = _away(self._hosts, self._rank)
        self._arrivals = {
            (source, chunk): self._receive(source, chunk)
            for source in reversed(self._away)
            for chunk in range(len(room.sizes[self._rank]))
        }

    @staticmethod
    def num_bytes(hosts: Sequence[int], room: Room) -> int:
        """What the buffer of any rank needs for it."""
        return max(len(hosts) + len(_away(hosts, rank)) for rank in range(len(hosts))) * room.most_bytes

    def term(self, owner: int, chunk: int) -> Tensor:
        """The memory, bytes, for what this rank adds to a chunk of a piece, until it is handed over."""
        if owner in self._away:
            slot = len(self._hosts) + self._away.index(owner)
            return self._memory(self._rank, slot, owner, chunk)
        return self._memory(owner, self._rank, owner, chunk)

    def hand_over(self, owner: int, chunk: int) -> None:
        """Let the owner have this rank's term of a chunk; those before it must have been handed over."""
        if owner in self._away:
            self._call.workspace.wire.send(self.term(owner, chunk), owner, TERM_TAG)
        else:
            self._call.tell_written(owner, chunk + 1)

    def total(self, chunk: int, out: Tensor) -> None:
        """Let `out`, of any strides, be a chunk of this rank's piece: its terms added up in the order of ranks.

        Raises:
            PeerLostError: a rank has ended before its term was there.
        """
        for source in range(len(self._hosts)):
            if source in self._away:
                self._arrivals[source, chunk].wait()
            elif source != self._rank:
                self._call.wait_written(source, chunk + 1)
        add_up(self._terms(chunk).view(out.dtype).view(-1, *out.shape), out)

    def _terms(self, chunk: int) -> Tensor:
        """All terms of a chunk of this rank's piece: (ranks, bytes)."""
        num_ranks, slot_bytes = len(self._hosts), self._room.most_bytes
        buffer = self._call.buffers[self._rank]
        slots = buffer[self._begin : self._begin + num_ranks * slot_bytes].view(num_ranks, slot_bytes)
        offset = self._room.offset(self._rank, chunk)
        return slots[:, offset : offset + self._room.sizes[self._rank][chunk]]

    def _receive(self, source: int, chunk: int) -> Arrival:
        return self._call.workspace.wire.receive(self._memory(self._rank, source, self._rank, chunk), source, TERM_TAG)

    def _memory(self, rank: int, slot: int, owner: int, chunk: int) -> Tensor:
        """The bytes of a chunk of the owner's piece in one of the slots of the buffer of `rank`."""
        begin = self._begin + slot * self._room.most_bytes + self._room.offset(owner, chunk)
        return self._call.buffers[rank][begin : begin + self._room.sizes[owner][chunk]]


def _away(hosts: Sequence[int], rank: int) -> list[int]:
    """The ranks of other hosts, in the order in which `rank` computes for them."""
    return [other for other in after(rank, len(hosts)) if hosts[other] != hosts[rank]]
