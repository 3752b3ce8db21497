"""The pieces of all ranks among the rows of a value, and the orders in which kernels compute its tiles.

The matrices of a value are stacked: their rows are numbered consecutively.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows with the digits (outer, parts, rows): `outer` times in a row, `rows` rows of each of the `parts` ranks."""

    outer: int
    parts: int
    rows: int

    @property
    def blocks(self) -> int:
        """The number of blocks, which are runs of `rows` rows of one rank."""
        return self.outer * self.parts

    def owner(self, row: int) -> int:
        """The rank that row `row` belongs to."""
        return row // self.rows % self.parts


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments are sent and signalled as a whole: up to `rows` rows of one block of `pieces`. In the order of rows."""

    pieces: Pieces
    rows: int

    @property
    def per_block(self) -> int:
        """The number of segments of a block; the last may be shorter."""
        return -(-self.pieces.rows // self.rows)

    @property
    def count(self) -> int:
        """The number of segments."""
        return self.pieces.blocks * self.per_block

    def of_row(self, row: int) -> int:
        """The segment that has row `row`."""
        block, within = divmod(row, self.pieces.rows)
        return block * self.per_block + within // self.rows

    def row_range(self, segment: int) -> range:
        """The rows of a segment."""
        block, place = divmod(segment, self.per_block)
        start = block * self.pieces.rows
        return range(start + place * self.rows, start + min((place + 1) * self.rows, self.pieces.rows))

    def row_range_of_piece(self, segment: int) -> range:
        """The rows of a segment, counted within its rank's piece."""
        rows = self.row_range(segment)
        start = rows.start // self.pieces.rows // self.pieces.parts * self.pieces.rows + rows.start % self.pieces.rows
        return range(start, start + len(rows))

    def of_rank(self, rank: int) -> Iterator[int]:
        """The segments of the rows of `rank`."""
        for block in range(rank, self.pieces.blocks, self.pieces.parts):
            yield from range(block * self.per_block, (block + 1) * self.per_block)


def ring_from(rank: int, parts: int) -> Iterator[int]:
    """The other ranks in the order in which `rank` receives from them: that of a ring, starting after itself.

    As in FLUX (Chang et al.): rank 5 of 8 takes 6, 7, 0, 1, 2, 3, 4.
    """
    return ((rank + step) % parts for step in range(1, parts))


def ring_towards(rank: int, parts: int) -> Iterator[int]:
    """The other ranks in the order in which `rank` sends to them, so that each receives in the order of `ring_from`."""
    return ((rank - step) % parts for step in range(1, parts))


def row_tiles(matrices: int, rows: int, tile_rows: int) -> Iterator[range]:
    """The rows of each tile of `tile_rows` rows, in each of `matrices` matrices of `rows` rows; the last is shorter."""
    for start in range(0, matrices * rows, rows):
        for first in range(start, start + rows, tile_rows):
            yield range(first, min(first + tile_rows, start + rows))


def order_of_arrival(tiles: Sequence[range], segments: Segments, rank: int) -> list[int]:
    """The tiles in the order in which their last segments arrive at `rank`; tiles of its own rows come first."""
    ranks = [rank, *ring_from(rank, segments.pieces.parts)]
    sequence = [segment for source in ranks for segment in segments.of_rank(source)]
    arrival = {segment: place for place, segment in enumerate(sequence)}
    local = segments.pieces.outer * segments.per_block

    def complete(tile: int) -> int:
        touched = range(segments.of_row(tiles[tile][0]), segments.of_row(tiles[tile][-1]) + 1)
        return max(arrival[segment] if arrival[segment] >= local else 0 for segment in touched)

    return sorted(range(len(tiles)), key=complete)


def order_of_owners(tiles: Sequence[range], pieces: Pieces, rank: int) -> list[int]:
    """The tiles by the owner of their first row, in ring order after `rank`, which comes last itself.

    So no two ranks write to the same rank at a time, as in FLUX (Chang et al.).
    """
    turn = {owner: place for place, owner in enumerate([*ring_from(rank, pieces.parts), rank])}
    return sorted(range(len(tiles)), key=lambda tile: turn[pieces.owner(tiles[tile][0])])


def signals_of_owner(tiles: Sequence[range], pieces: Pieces, owner: int, tile_rows: int) -> list[int]:
    """How many signals a rank that computes these tiles sends for each row of tiles of the piece of `owner`.

    The rows of a piece, (outer, rows), are divided into tiles of `tile_rows` rows, as those of the product are. A rank
    that has stored a tile of the product sends one signal for each block of rows in it, and each tile of the block's
    piece that these rows are in.
    """
    found = [0] * -(-pieces.outer * pieces.rows // tile_rows)
    for tile in tiles:
        for block in range(tile[0] // pieces.rows, tile[-1] // pieces.rows + 1):
            if block % pieces.parts == owner:
                before = (block - block // pieces.parts) * pieces.rows
                first = max(tile[0], block * pieces.rows) - before
                last = min(tile[-1], (block + 1) * pieces.rows - 1) - before
                for touched in range(first // tile_rows, last // tile_rows + 1):
                    found[touched] += 1
    return found


def band_of_a_piece(band: int, num_tiles: int, parts: int) -> int:
    """The number of row tiles, up to `band`, that are traversed together, for cache hits; `num_tiles` in all.

    A band is a part of one rank's tiles: else it would wait for rows of several ranks before it is done with any.
    """
    of_rank = max(1, num_tiles // parts)
    return -(-of_rank // -(-of_rank // band))
