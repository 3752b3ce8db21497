"""Terms that every rank adds to the piece of every other: in the owner's memory, or sent there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fxpar.core.sum import add_up, total_dtype
from fxpar.errors import PeerLostError
from fxpar.lowering.cpu.pieces import KEPT, Room, as_box
from fxpar.lowering.cpu.ring import adder_before, after
from fxpar.lowering.cpu.wire import TERM_TAG, Arrival
from fxpar.lowering.cpu.workspace import Call


class Compute(Protocol):
    """Computes a term."""

    def __call__(self, out: Tensor, *, adds: bool) -> None:
        """Let `out` be the term, or have it added where it `adds`."""


class Scattering:
    """A call's part in which each rank adds a term to the piece of every rank, chunk by chunk.

    On the owner's host a sum goes around: each rank adds its term to what those before it in the ring have added up, so
    that no term is written and read again. Ranks of other hosts send theirs. In the buffer of a rank lie the sum of its
    own piece, the terms that come from other hosts, and those that go there.

    Args:
        call: the call, of every rank of the group.
        begin: where in the buffers this may use `num_bytes`.
        room: of the pieces of all ranks.
        dtype: of the pieces.
    """

    def __init__(self, call: Call, begin: int, room: Room, dtype: torch.dtype) -> None:
        self._call = call
        self._begin = begin
        self._room, self._sums = room, _of_sums(room, dtype)
        self._hosts, self._rank = call.workspace.hosts, call.workspace.rank
        self._away = _away(self._hosts, self._rank)
        self._arrivals = {
            (source, chunk): self._receive(source, chunk)
            for source in reversed(self._away)
            for chunk in range(len(room.sizes[self._rank]))
        }

    @staticmethod
    def num_bytes(hosts: Sequence[int], room: Room, dtype: torch.dtype) -> int:
        """What the buffer of any rank needs for it."""
        most_away = max(len(_away(hosts, rank)) for rank in range(len(hosts)))
        return _of_sums(room, dtype).most_bytes + 2 * most_away * room.most_bytes

    def add(self, owner: int, chunk: int, like: Tensor, compute: Compute) -> None:
        """Compute this rank's term of a chunk of another's piece where it belongs, and let who needs it have it.

        The chunks before it must have been added. `like` is a tensor of the chunk's shape and dtype.

        Raises:
            PeerLostError: a rank that adds to it before has ended.
        """
        if owner in self._away:
            memory = self._memory(len(self._away) + self._away.index(owner), owner, chunk)
            compute(as_box(memory, like), adds=False)
            self._call.workspace.wire.send(memory, owner, TERM_TAG)
        else:
            added, is_begun = self._wait_for_turn(owner, chunk, like)
            compute(added, adds=is_begun)
            self._call.tell_added(owner, chunk + 1)

    def total(self, chunk: int, out: Tensor, compute: Compute) -> None:
        """Let `out`, of any strides, be a chunk of this rank's piece, with its own term: the last on its host.

        Raises:
            PeerLostError: a rank has ended before its term was there.
        """
        added, is_begun = self._wait_for_turn(self._rank, chunk, out)
        if not self._away and added.dtype == out.dtype:
            if is_begun:
                out.copy_(added)
            compute(out, adds=is_begun)
            return
        compute(added, adds=is_begun)
        add_up([added, *(self._arrived(source, chunk, out) for source in sorted(self._away))], out)

    def _wait_for_turn(self, owner: int, chunk: int, like: Tensor) -> tuple[Tensor, bool]:
        """What was added to a chunk by the ranks of its owner's host before this one, and whether there are such."""
        before = adder_before(self._hosts, owner, self._rank)
        if before is not None:
            try:
                self._call.wait_added(before, owner, chunk + 1)
            except PeerLostError:
                self._call.tell_none_added()
                raise
        begin = self._begin + self._sums.offset(owner, chunk)
        memory = self._call.buffers[owner][begin : begin + self._sums.sizes[owner][chunk]]
        return memory.view(total_dtype(like.dtype)).view(like.shape), before is not None

    def _arrived(self, source: int, chunk: int, like: Tensor) -> Tensor:
        self._arrivals[source, chunk].wait()
        return as_box(self._memory(self._away.index(source), self._rank, chunk), like)

    def _receive(self, source: int, chunk: int) -> Arrival:
        memory = self._memory(self._away.index(source), self._rank, chunk)
        return self._call.workspace.wire.receive(memory, source, TERM_TAG)

    def _memory(self, slot: int, owner: int, chunk: int) -> Tensor:
        """The bytes of a chunk of the owner's piece in a slot behind the sum in this rank's buffer."""
        begin = self._begin + self._sums.most_bytes + slot * self._room.most_bytes + self._room.offset(owner, chunk)
        return self._call.buffers[self._rank][begin : begin + self._room.sizes[owner][chunk]]


@lru_cache(KEPT)
def _of_sums(room: Room, dtype: torch.dtype) -> Room:
    """The room of sums of pieces of `dtype`."""
    factor = total_dtype(dtype).itemsize // dtype.itemsize
    return Room(tuple(tuple(factor * size for size in sizes) for sizes in room.sizes))


def _away(hosts: Sequence[int], rank: int) -> list[int]:
    """The ranks of other hosts, in the order in which `rank` computes for them."""
    return [other for other in after(rank, len(hosts)) if hosts[other] != hosts[rank]]
