"""The pieces of all ranks in a dim that is gathered or scattered, and the chunks in which a piece is transferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from torch import Tensor

KEPT = 4096
"""Entries of the caches of offsets by sizes: every step makes the same calls as the step before."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a piece: ranges of its outer digit and of its rows."""

    outer: range
    rows: range


@dataclass(frozen=True, slots=True)
class Pieces:
    """The digits (outer, parts, rows) of a dim; `rows[part]` is the number of rows in the piece of that rank."""

    outer: int
    rows: tuple[int, ...]

    @classmethod
    def equal(cls, outer: int, parts: int, size: int) -> Pieces:
        """Pieces that have `size` entries each, their outer digits included."""
        return cls(outer, (size // outer if outer else 0,) * parts)

    @classmethod
    def ragged(cls, parts: int, size: int) -> Pieces:
        """`size` rows in pieces that differ by one row at most."""
        return cls(1, tuple(size * (part + 1) // parts - size * part // parts for part in range(parts)))

    def chunks(self, part: int, ends: Sequence[float]) -> list[Chunk]:
        """The piece of `part` in chunks that end at about these fractions of it, the last at 1; none is empty."""
        rows = self.rows[part]
        if self.outer == 0 or rows == 0:
            return []
        if self.outer > 1:
            return [Chunk(outer, range(rows)) for outer in _ranges(self.outer, ends)]
        return [Chunk(range(1), some) for some in _ranges(rows, ends)]

    def whole(self, part: int) -> Chunk:
        """All of the piece of `part`."""
        return Chunk(range(self.outer), range(self.rows[part]))

    def box(self, whole: Tensor, dim: int, part: int, chunk: Chunk) -> Tensor:
        """The view of a chunk in `whole`, whose `dim` has these pieces: (outer, ..., rows, ...), outer digits first."""
        sizes, strides, offset = _box(self, whole.shape, whole.stride(), dim, part, chunk)
        return whole.as_strided(sizes, strides, whole.storage_offset() + offset)

    def alone(self, part: int) -> Pieces:
        """The digits of the same dim in the piece of `part` as a tensor of its own: there is one part, 0."""
        return Pieces(self.outer, (self.rows[part],))


@lru_cache(KEPT)
def _box(
    pieces: Pieces, shape: tuple[int, ...], strides: tuple[int, ...], dim: int, part: int, chunk: Chunk
) -> tuple[list[int], list[int], int]:
    """The shape and strides of a box, and its offset in elements from the first one of the whole."""
    dim %= len(shape)
    row, num_rows = strides[dim], sum(pieces.rows)
    begin = chunk.outer.start * num_rows + sum(pieces.rows[:part]) + chunk.rows.start
    of_box = [len(chunk.outer), *shape]
    of_box[dim + 1] = len(chunk.rows)
    return of_box, [num_rows * row, *strides], begin * row


def as_box(memory: Tensor, box: Tensor) -> Tensor:
    """The bytes `memory` as a dense tensor of the dtype and shape of `box`."""
    return memory.view(box.dtype).view(box.shape)


def _ranges(size: int, ends: Sequence[float]) -> list[range]:
    bounds = sorted({0, *(round(size * end) for end in ends)})
    return [range(begin, end) for begin, end in pairwise(bounds)]


_ALIGNMENT_BYTES = 64  # a cache line, so that different ranks never write to the same one


@dataclass(frozen=True)
class Room:
    """The layout of pieces in memory, chunk after chunk, of `sizes[part][chunk]` bytes each."""

    sizes: tuple[tuple[int, ...], ...]

    @cached_property
    def most_bytes(self) -> int:
        """The size of the largest piece."""
        return max(begins[-1] for begins in self._begins.values())

    @cached_property
    def _begins(self) -> Mapping[tuple[int, ...], tuple[int, ...]]:
        return {chunks: (0, *accumulate(map(_aligned, chunks))) for chunks in set(self.sizes)}

    def piece_bytes(self, part: int) -> int:
        """The size of the piece of `part`, with alignment."""
        return self._begins[self.sizes[part]][-1]

    def offset(self, part: int, chunk: int) -> int:
        """The offset of a chunk in its piece, in bytes."""
        return self._begins[self.sizes[part]][chunk]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


# The chunks in which pieces are transferred, as the fractions of a piece at which they end. The product of the last
# chunk to arrive, and that of the first chunk to be sent, overlap with no communication, so these chunks are small. The
# others are large, since products of few rows take longer per row.

_MOST_HALVINGS = 3
_FEWEST_ROWS = 128
# Smaller messages cost more in latency than they gain in overlap.
_FEWEST_BYTES = 1 << 15
_MOST_SENT = 4


def gathered_ends(hosts: Sequence[int], piece: Tensor, dim: int) -> list[float]:
    """For pieces that are gathered in `dim`. On a single host there is one chunk, since pieces are read in place."""
    if len(set(hosts)) == 1:
        return [1.0]
    smallest = max(1, min(piece.shape[dim] // _FEWEST_ROWS, piece.nbytes // _FEWEST_BYTES))
    halvings = min(_MOST_HALVINGS, smallest.bit_length() - 1)
    return [*(1 - 0.5**i for i in range(1, halvings + 1)), 1.0]


def scattered_ends(hosts: Sequence[int], piece: Tensor, dim: int) -> list[float]:
    """For pieces that are scattered in `dim`. On a single host there is one chunk: terms are written in place."""
    if len(set(hosts)) == 1:
        return [1.0]
    count = max(1, min(piece.shape[dim] // _FEWEST_ROWS, piece.nbytes // _FEWEST_BYTES, _MOST_SENT))
    return [(i + 1) / count for i in range(count)]
