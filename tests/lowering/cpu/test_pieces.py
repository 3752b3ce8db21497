"""Chunks cut pieces, and pieces cut dims, so that nothing is left out or taken twice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.lowering.cpu.pieces import Pieces, Room


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9), st.lists(st.floats(0, 1)), st.integers(0, 1))
def test_all_chunks_of_all_pieces_are_the_whole(outer: int, parts: int, rows: int, ends: list[float], dim: int) -> None:
    pieces = Pieces.equal(outer, parts, outer * rows)
    shape = [3, 3]
    shape[dim] = outer * parts * rows
    whole = torch.zeros(shape)
    for part in range(parts):
        for chunk in pieces.chunks(part, [*ends, 1.0]):
            box = pieces.box(whole, dim, part, chunk)
            assert box.shape[0] == len(chunk.outer) and box.shape[dim + 1] == len(chunk.rows)
            box.add_(1)
    assert whole.eq(1).all()


@given(st.integers(1, 9), st.integers(0, 40))
def test_ragged_pieces_differ_by_a_row_at_most(parts: int, size: int) -> None:
    rows = Pieces.ragged(parts, size).rows
    assert sum(rows) == size
    assert max(rows) - min(rows) <= 1


def test_chunks_are_of_rows_or_of_outer_digits() -> None:
    assert [len(chunk.rows) for chunk in Pieces.equal(1, 3, 16).chunks(0, [0.5, 0.75, 1.0])] == [8, 4, 4]
    assert [len(chunk.outer) for chunk in Pieces.equal(4, 3, 16).chunks(0, [0.5, 0.75, 1.0])] == [2, 1, 1]
    assert len(Pieces.equal(1, 3, 2).chunks(0, [0.1, 0.2, 0.9, 1.0])) == 1, "no chunk is empty"
    whole = Pieces.equal(2, 3, 10).whole(0)
    assert (whole.outer, whole.rows) == (range(2), range(5))


def test_a_box_is_of_the_rows_of_its_part_under_every_outer_digit() -> None:
    whole = torch.arange(12)[:, None]
    pieces = Pieces.equal(2, 3, 4)
    chunk = pieces.whole(1)
    assert pieces.box(whole, 0, 1, chunk).tolist() == [[[2], [3]], [[8], [9]]]
    assert pieces.alone(1).box(torch.arange(4)[:, None], 0, 0, chunk).tolist() == [[[0], [1]], [[2], [3]]]


def test_chunks_lie_apart_in_memory() -> None:
    room = Room(((100, 64), (1,)))
    assert [room.offset(0, 0), room.offset(0, 1), room.piece_bytes(0)] == [0, 128, 192]
    assert room.most_bytes == 192
