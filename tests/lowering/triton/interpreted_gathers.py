"""Products of gathered rows, in Triton's interpreter: run by test_interpreted.py in a process of its own."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxpar.lowering.triton.gather import Gather, multiply
from fxpar.lowering.triton.launch import Arrival, gathered_call
from fxpar.lowering.triton.pieces import Pieces, Segments
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.tile import place_of_tile
from fxpar.lowering.triton.tiling import DTYPES, Tiling
from tests.lowering.triton.kernel_inputs import BY_DESCRIPTORS, SMALL, WIDE, joined, there_at
from tests.lowering.triton.products import assert_product, factor


def gathered_product(
    gathered: Tensor, right: Tensor, arrival: Arrival, tiling: Tiling = SMALL, bias: Tensor | None = None
) -> Tensor:
    """By the kernel, into memory that holds no numbers; (matrices, rows, columns)."""
    out = torch.full((gathered.shape[0], gathered.shape[1], right.shape[2]), torch.nan, dtype=gathered.dtype)
    gathered_call(gathered, right, bias, out, arrival, tiling).run(3)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "terms", "columns"), [(5, 19, 21), (16, 32, 16), (1, 1, 1), (20, 7, 3)])
def test_a_gathered_product_is_right_for_any_sizes(dtype: torch.dtype, rows: int, terms: int, columns: int) -> None:
    gathered, right = factor(1, 4 * rows, terms, dtype=dtype), factor(1, terms, columns, dtype=dtype, seed=1)
    for tiling in (SMALL, WIDE):
        found = gathered_product(gathered, right, there_at(Segments(Pieces(1, 4, rows), 3), 1), tiling)
        assert_product(found, gathered, right)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_loaded_by_descriptors_give_the_same_bits(dtype: torch.dtype, transposed: bool) -> None:
    gathered, right = factor(1, 40, 24, dtype=dtype), factor(1, 24, 24, dtype=dtype, seed=1)
    right = right.mT if transposed else right
    arrival = there_at(Segments(Pieces(1, 4, 10), 4), 2)
    assert gathered_product(gathered, right, arrival, BY_DESCRIPTORS).equal(
        gathered_product(gathered, right, arrival, SMALL)
    )


@pytest.mark.parametrize("shape", [(1,), (21,), (20, 1), (20, 21), (1, 1, 21), (2, 20, 21)])
def test_a_bias_of_any_shape_is_added(shape: tuple[int, ...]) -> None:
    gathered, right = factor(2, 20, 9), factor(2, 9, 21, seed=1)
    bias = factor(*shape, seed=2).expand(2, 20, 21)
    found = gathered_product(gathered, right, there_at(Segments(Pieces(4, 2, 5), 2), 1), WIDE, bias)
    assert_product(found, gathered, right, bias)


def test_results_may_lie_in_memory_in_any_order() -> None:
    gathered, right = factor(1, 20, 9), factor(1, 9, 21, seed=1)
    out = torch.full((1, 21, 20), torch.nan).mT
    gathered_call(gathered, right, None, out, there_at(Segments(Pieces(1, 4, 5), 5), 0), SMALL).run(2)
    assert_product(out, gathered, right)


def test_neither_rank_nor_segments_change_a_bit() -> None:
    gathered, right = factor(1, 44, 20, dtype=torch.float16), factor(1, 20, 9, dtype=torch.float16, seed=1)
    pieces = Pieces(1, 4, 11)
    expected = gathered_product(gathered, right, there_at(Segments(pieces, 11), 0))
    for rank, rows in product((0, 1, 3), (1, 4, 11)):
        assert gathered_product(gathered, right, there_at(Segments(pieces, rows), rank)).equal(expected)


@pytest.mark.parametrize(
    ("form", "shape"),
    [("rows", (12, 8)), ("rows", (3, 8, 8)), ("columns", (12, 8)), ("columns", (3, 8, 8)), ("matrices", (4, 5, 8))],
)
@pytest.mark.parametrize("outer", [1, 2])
def test_gathered_values_are_multiplied_as_the_op_defines(form: str, shape: tuple[int, ...], outer: int) -> None:
    shards = [factor(*shape, seed=rank) for rank in range(4)]
    gathered = joined(torch.stack(shards), 0 if form == "matrices" else -2, outer)
    gather = Gather.of(shards[2], form, outer, 4)
    assert gather.shape == gathered.shape
    segments = Segments(gather.pieces, 3)
    for rank, shard in enumerate(shards):
        rows, flat = gathered.flatten(0, -2), shard.flatten(0, -2)
        for segment in segments.of_rank(rank):
            here, there = segments.row_range(segment), segments.row_range_of_piece(segment)
            assert rows[here.start : here.stop].equal(flat[there.start : there.stop])
    other = factor(*shape[:-2], 7, 8, seed=5) if form == "columns" else factor(*gathered.shape[:-2], 8, 7, seed=5)
    left, right = (other, gathered.mT) if form == "columns" else (gathered, other)
    for bias in (None, factor(right.shape[-1], seed=6), factor(left.shape[-2], 1, seed=7)):
        found = multiply(gathered, other, bias, form, there_at(segments, 2), Fused(SMALL, 3))
        assert_product(found, left, right, bias)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_bands_walk_over_every_tile_once(rows: int, columns: int, band: int) -> None:
    walk = [place_of_tile.fn(tile, rows, columns, band) for tile in range(rows * columns)]
    assert sorted(walk) == sorted(product(range(rows), range(columns)))
