"""The terms that every rank adds to the piece of every other rank: in the owner's memory, or sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fxpar.core.sum import add_up, total_dtype
from fxpar.errors import PeerLostError
from fxpar.lowering.cpu.pieces import KEPT, Chunk, Room, as_box
from fxpar.lowering.cpu.ring import adder_before, after, far_first
from fxpar.lowering.cpu.terms import Terms
from fxpar.lowering.cpu.wire import TERM_TAG, Arrival
from fxpar.lowering.cpu.workspace import Call


@dataclass(frozen=True)
class Cut:
    """The chunks of every rank's piece, each with a tensor that has its shape and dtype."""

    pieces: Sequence[Sequence[tuple[Chunk, Tensor]]]

    @cached_property
    def room(self) -> Room:
        """Their layout in memory."""
        return Room(tuple(tuple(like.nbytes for _, like in piece) for piece in self.pieces))


class Scattering:
    """The reduce-scatter of a call: each rank adds a term to the piece of every rank, chunk by chunk.

    On the owner's host, ranks take turns: each adds its term to the running sum of the ranks before it in the ring, so
    that no term is stored and read again. Ranks of other hosts send their terms. The buffer of a rank has the sum of
    its own piece, the terms that it receives from other hosts, and those that it sends to them.

    Args:
        call: the call, of every rank of the group.
        begin: the offset in the buffers of the `num_bytes` that this may use.
        cut: the chunks of the pieces of all ranks.
        terms: those of this rank.
    """

    def __init__(self, call: Call, begin: int, cut: Cut, terms: Terms) -> None:
        self._call = call
        self._begin = begin
        self._cut, self._terms = cut, terms
        self._room, self._sums = cut.room, _of_sums(cut.room, terms.dtype)
        self._hosts, self._rank = call.workspace.hosts, call.workspace.rank
        self._away = _away(self._hosts, self._rank)
        self._arrivals = {
            (source, number): self._receive(source, number)
            for source in reversed(self._away)
            for number in range(len(cut.pieces[self._rank]))
        }

    @staticmethod
    def num_bytes(hosts: Sequence[int], room: Room, dtype: torch.dtype) -> int:
        """The bytes that it needs in the buffer of every rank."""
        most_away = max(len(_away(hosts, rank)) for rank in range(len(hosts)))
        return _of_sums(room, dtype).most_bytes + 2 * most_away * room.most_bytes

    def add_to_others(self) -> None:
        """Add this rank's terms to all other pieces of its host, and send those of other hosts.

        Raises:
            PeerLostError: a rank that adds to a piece before this one has ended.
        """
        for owner in far_first(self._hosts, self._rank):
            for number in range(len(self._cut.pieces[owner])):
                self._add(owner, number)

    def total(self, number: int, out: Tensor) -> None:
        """Write a chunk of this rank's piece, its own term included, to `out`, which may have any strides.

        Raises:
            PeerLostError: a rank has ended before its term arrived.
        """
        chunk, _ = self._cut.pieces[self._rank][number]
        added, is_begun = self._wait_for_turn(self._rank, number)
        if not self._away and added.dtype == out.dtype:
            if is_begun:
                out.copy_(added)
            self._terms.compute(self._rank, chunk, out, adds=is_begun)
            return
        self._terms.compute(self._rank, chunk, added, adds=is_begun)
        add_up([added, *(self._arrived(source, number, out) for source in sorted(self._away))], out)

    def _add(self, owner: int, number: int) -> None:
        """Add or send this rank's term of a chunk; those of earlier chunks must have been added."""
        chunk, like = self._cut.pieces[owner][number]
        if owner in self._away:
            memory = self._memory(len(self._away) + self._away.index(owner), owner, number)
            self._terms.compute(owner, chunk, as_box(memory, like))
            self._call.workspace.wire.send(memory, owner, TERM_TAG)
        else:
            added, is_begun = self._wait_for_turn(owner, number)
            self._terms.compute(owner, chunk, added, adds=is_begun)
            self._call.signal_added(owner, number + 1)

    def _wait_for_turn(self, owner: int, number: int) -> tuple[Tensor, bool]:
        """Wait for the ranks that add to a chunk before this one; returns the sum so far, and whether there is one."""
        before = adder_before(self._hosts, owner, self._rank)
        if before is not None:
            try:
                self._call.wait_added(before, owner, number + 1)
            except PeerLostError:
                self._call.signal_failed()
                raise
        _, like = self._cut.pieces[owner][number]
        begin = self._begin + self._sums.offset(owner, number)
        memory = self._call.buffers[owner][begin : begin + self._sums.sizes[owner][number]]
        return memory.view(total_dtype(like.dtype)).view(like.shape), before is not None

    def _arrived(self, source: int, number: int, like: Tensor) -> Tensor:
        self._arrivals[source, number].wait()
        return as_box(self._memory(self._away.index(source), self._rank, number), like)

    def _receive(self, source: int, number: int) -> Arrival:
        memory = self._memory(self._away.index(source), self._rank, number)
        return self._call.workspace.wire.receive(memory, source, TERM_TAG)

    def _memory(self, slot: int, owner: int, number: int) -> Tensor:
        """The bytes of a chunk of the owner's piece, in one of the slots after the sum in this rank's buffer."""
        begin = self._begin + self._sums.most_bytes + slot * self._room.most_bytes + self._room.offset(owner, number)
        return self._call.buffers[self._rank][begin : begin + self._room.sizes[owner][number]]


@lru_cache(KEPT)
def _of_sums(room: Room, dtype: torch.dtype) -> Room:
    """The layout of the sums of pieces of `dtype`, which may be wider."""
    factor = total_dtype(dtype).itemsize // dtype.itemsize
    return Room(tuple(tuple(factor * size for size in sizes) for sizes in room.sizes))


def _away(hosts: Sequence[int], rank: int) -> list[int]:
    """The ranks of other hosts, in the order in which `rank` computes for them."""
    return [other for other in after(rank, len(hosts)) if hosts[other] != hosts[rank]]
