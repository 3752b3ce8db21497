"""Segments cover all rows once, and tiles are taken up each once, in the order in which they can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.lowering.triton.pieces import (
    Pieces,
    Segments,
    band_of_a_piece,
    order_of_arrival,
    order_of_owners,
    ring_from,
    ring_towards,
    row_tiles,
    signals_of_owner,
)

pieces = st.builds(Pieces, outer=st.integers(1, 3), parts=st.integers(1, 8), rows=st.integers(1, 20))


@given(pieces, st.integers(1, 25))
def test_segments_number_all_rows_once_in_order(pieces: Pieces, rows: int) -> None:
    segments = Segments(pieces, rows)
    ranges = [segments.row_range(segment) for segment in range(segments.count)]
    assert [row for rows in ranges for row in rows] == list(range(pieces.blocks * pieces.rows))
    for segment, its_rows in enumerate(ranges):
        assert {segments.of_row(row) for row in its_rows} == {segment}
        assert len({pieces.owner(row) for row in its_rows}) == 1
        assert len(its_rows) <= rows


@given(pieces, st.integers(1, 25))
def test_each_segment_is_of_the_rank_that_owns_its_rows(pieces: Pieces, rows: int) -> None:
    segments = Segments(pieces, rows)
    for rank in range(pieces.parts):
        owned = [s for s in range(segments.count) if pieces.owner(segments.row_range(s)[0]) == rank]
        assert list(segments.of_rank(rank)) == owned


def test_rank_5_of_8_receives_in_the_order_of_the_paper() -> None:
    assert list(ring_from(5, 8)) == [6, 7, 0, 1, 2, 3, 4]


def test_what_all_ranks_send_in_turn_is_what_each_expects_in_turn() -> None:
    for receiver in range(8):
        senders = [next(r for r in range(8) if list(ring_towards(r, 8))[turn] == receiver) for turn in range(7)]
        assert senders == list(ring_from(receiver, 8))


@given(pieces, st.integers(1, 25), st.integers(1, 40), st.data())
def test_tiles_come_in_the_order_of_arrival_each_once(
    pieces: Pieces, rows: int, tile_rows: int, data: st.DataObject
) -> None:
    matrices = data.draw(st.sampled_from([1, pieces.outer]))
    rank = data.draw(st.integers(0, pieces.parts - 1))
    tiles = list(row_tiles(matrices, pieces.blocks * pieces.rows // matrices, tile_rows))
    order = order_of_arrival(tiles, Segments(pieces, rows), rank)
    assert sorted(order) == list(range(len(tiles)))
    distance = [max((pieces.owner(row) - rank) % pieces.parts for row in tiles[tile]) for tile in order]
    assert distance == sorted(distance)


@given(pieces, st.integers(1, 40), st.data())
def test_tiles_go_to_their_owners_in_turn_each_once_and_the_own_ones_last(
    pieces: Pieces, tile_rows: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, pieces.parts - 1))
    tiles = list(row_tiles(1, pieces.blocks * pieces.rows, tile_rows))
    order = order_of_owners(tiles, pieces, rank)
    assert sorted(order) == list(range(len(tiles)))
    turns = [(pieces.owner(tiles[tile][0]) - rank - 1) % pieces.parts for tile in order]
    assert turns == sorted(turns)


def test_ranks_begin_with_different_owners() -> None:
    pieces = Pieces(1, 8, 4)
    tiles = list(row_tiles(1, 32, 4))
    assert sorted(order_of_owners(tiles, pieces, rank)[0] for rank in range(8)) == list(range(8))


@given(pieces, st.integers(1, 40))
def test_owners_get_one_signal_for_each_tile_and_block_and_tile_of_their_piece(pieces: Pieces, tile_rows: int) -> None:
    tiles = list(row_tiles(1, pieces.blocks * pieces.rows, tile_rows))
    for owner in range(pieces.parts):
        owned = [row for row in range(pieces.blocks * pieces.rows) if pieces.owner(row) == owner]
        touched = {
            (tile[0], row // pieces.rows, place // tile_rows)
            for tile in tiles
            for place, row in enumerate(owned)
            if row in tile
        }
        counted = Counter(tile_of_piece for _, _, tile_of_piece in touched)
        found = signals_of_owner(tiles, pieces, owner, tile_rows)
        assert found == [counted[tile] for tile in range(-(-len(owned) // tile_rows))]


def test_whole_tiles_send_one_signal_each() -> None:
    assert signals_of_owner(list(row_tiles(1, 1024, 64)), Pieces(1, 4, 256), 2, 64) == [1, 1, 1, 1]


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 8))
def test_bands_divide_the_tiles_of_a_rank_evenly(band: int, of_rank: int, parts: int) -> None:
    found = band_of_a_piece(band, of_rank * parts, parts)
    bands = -(-of_rank // band)
    assert 1 <= found <= band and bands == -(-of_rank // found)
    assert found * bands - of_rank < bands, "the last band is hardly smaller"


@pytest.mark.parametrize(("of_rank", "bands"), [(1, [1]), (4, [4]), (8, [8]), (12, [6, 6]), (16, [8, 8])])
def test_a_band_has_tiles_of_one_rank(of_rank: int, bands: list[int]) -> None:
    assert [band_of_a_piece(8, of_rank * 8, 8)] * len(bands) == bands
