"""Chunks cut pieces, and pieces cut dims, so that nothing is left out or taken twice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.lowering.cpu.pieces import Pieces, Room


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9), st.integers(1, 12), st.integers(0, 1))
def test_all_chunks_of_all_pieces_are_the_whole(outer: int, parts: int, rows: int, count: int, dim: int) -> None:
    pieces = Pieces.equal(outer, parts, outer * rows)
    shape = [3, 3]
    shape[dim] = outer * parts * rows
    whole = torch.zeros(shape)
    for part in range(parts):
        for chunk in pieces.chunks(part, count):
            box = pieces.box(whole, dim, part, chunk)
            assert box.shape[0] == len(chunk.outer) and box.shape[dim + 1] == len(chunk.rows)
            box.add_(1)
    assert whole.eq(1).all()


@given(st.integers(1, 9), st.integers(0, 40))
def test_ragged_pieces_differ_by_a_row_at_most(parts: int, size: int) -> None:
    rows = Pieces.ragged(parts, size).rows
    assert sum(rows) == size
    assert max(rows) - min(rows) <= 1


def test_a_chunk_has_whole_rows_of_some_outer_digits_or_some_rows_of_one() -> None:
    pieces = Pieces.equal(2, 3, 10)
    assert [(len(chunk.outer), len(chunk.rows)) for chunk in pieces.chunks(0, 2)] == [(1, 5), (1, 5)]
    assert [(len(chunk.outer), len(chunk.rows)) for chunk in pieces.chunks(0, 4)] == [(1, 2), (1, 3), (1, 2), (1, 3)]
    assert len(pieces.chunks(0, 1)) == 1
    assert len(pieces.chunks(0, 100)) == 10, "no chunk is empty"


def test_a_box_is_of_the_rows_of_its_part_under_every_outer_digit() -> None:
    whole = torch.arange(12)[:, None]
    pieces = Pieces.equal(2, 3, 4)
    (chunk,) = pieces.chunks(1, 1)
    assert pieces.box(whole, 0, 1, chunk).tolist() == [[[2], [3]], [[8], [9]]]
    assert pieces.alone(1).box(torch.arange(4)[:, None], 0, 0, chunk).tolist() == [[[0], [1]], [[2], [3]]]


def test_chunks_lie_apart_in_memory() -> None:
    room = Room(((100, 64), (1,)))
    assert [room.offset(0, 0), room.offset(0, 1), room.piece_bytes(0)] == [0, 128, 192]
    assert room.most_bytes == 192
