"""Products scattered and summed, in Triton's interpreter: run by test_interpreted.py in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxpar.lowering.triton.launch import Destinations, places_of, scattered_call, sum_call, sum_programs
from fxpar.lowering.triton.pieces import Pieces, row_tiles, signals_of_owner
from fxpar.lowering.triton.scatter import Product
from fxpar.lowering.triton.tiling import DTYPES, Tiling
from tests.lowering.triton.kernel_inputs import BY_DESCRIPTORS, SMALL, joined
from tests.lowering.triton.products import assert_product, factor


class Owners:
    """The memory of all ranks, which holds no numbers, with guards around the pieces."""

    def __init__(self, pieces: Pieces, rows_of_piece: int, columns: int, dtype: torch.dtype) -> None:
        self.pieces = pieces
        self.memory = torch.full((pieces.parts, pieces.parts, rows_of_piece + 1, columns), torch.nan, dtype=dtype)
        self.counters = torch.zeros(pieces.parts, pieces.parts, dtype=torch.int32)

    def destinations(self, rank: int, strides: tuple[int, int]) -> Destinations:
        pieces = (self.memory[owner, rank].data_ptr() for owner in range(self.pieces.parts))
        places = torch.tensor(places_of(pieces, self.memory))
        counters = torch.tensor([self.counters[owner, rank].data_ptr() for owner in range(self.pieces.parts)])
        return Destinations(self.memory, places, counters, self.pieces, rank, strides)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outer", "rows", "terms", "columns"), [(1, 16, 16, 16), (1, 5, 19, 24), (3, 7, 3, 8)])
def test_a_scattered_product_is_summed_by_owners(
    dtype: torch.dtype, outer: int, rows: int, terms: int, columns: int
) -> None:
    pieces = Pieces(outer, 4, rows)
    owners = Owners(pieces, outer * rows, columns, dtype)
    lefts = [factor(1, pieces.blocks * rows, terms, dtype=dtype, seed=rank) for rank in range(4)]
    rights = [factor(1, terms, columns, dtype=dtype, seed=10 + rank) for rank in range(4)]
    biases = [factor(columns, dtype=dtype, seed=20 + rank).expand(1, pieces.blocks * rows, -1) for rank in range(4)]
    for rank, factors in enumerate(zip(lefts, rights, biases, strict=True)):
        scattered_call(*factors, owners.destinations(rank, (columns, 1)), SMALL).run(3)
    signals = signals_of_owner_of(pieces, SMALL, columns)
    ones = torch.ones(1, pieces.blocks * rows, 1)
    whole_left = torch.cat([*lefts, *[ones] * 4], dim=-1).double()
    whole_right = torch.cat([*rights, *[bias[:, :1] for bias in biases]], dim=-2).double()
    for owner in range(4):
        out = torch.full((outer * rows, columns), torch.nan, dtype=dtype)
        piece = owners.memory[owner].flatten(1)
        sum_call(piece, out, owners.counters[owner], signals(owner)).run(sum_programs(out))
        expected_left = whole_left.view(outer, 4, rows, -1)[:, owner].flatten(0, 1)
        assert_scattered(out, expected_left, whole_right[0])
        assert owners.counters[owner].tolist() == [signals(owner)] * 4
        assert bool(owners.memory[owner, :, -1].isnan().all()), "a tile was stored outside of its piece"


def signals_of_owner_of(pieces: Pieces, tiling: Tiling, columns: int) -> Callable[[int], int]:
    """How many signals an owner gets of each rank."""
    tiles = list(row_tiles(1, pieces.blocks * pieces.rows, tiling.m))
    return lambda owner: signals_of_owner(tiles, pieces, owner) * -(-columns // tiling.n)


def assert_scattered(found: Tensor, left: Tensor, right: Tensor) -> None:
    """As `assert_product`, but that each of 4 ranks' products was rounded, and may be larger than their sum."""
    exact, magnitude = left @ right, left.abs() @ right.abs()
    bound = 3 * torch.finfo(found.dtype).eps * magnitude + left.shape[-1] * 2.0**-23 * magnitude
    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("tiling", [SMALL, BY_DESCRIPTORS])
def test_transposed_factors_and_pieces_are_scattered_alike(tiling: Tiling) -> None:
    left, right = factor(1, 24, 40).mT, factor(1, 16, 24, seed=1).mT
    pieces = Pieces(1, 4, 10)
    owners = Owners(pieces, 10, 16, torch.float32)
    scattered_call(left, right, None, owners.destinations(2, (1, 10)), tiling).run(2)
    found = torch.stack([owners.memory[owner, 2].flatten()[:160].view(16, 10).T for owner in range(4)])
    assert_product(found.view(40, 16), left[0], right[0])


@pytest.mark.parametrize(("form", "left", "right"), [("rows", (24, 8), (8, 7)), ("rows", (3, 24, 8), (3, 8, 7)),
    ("columns", (5, 8), (8, 24)), ("matrices", (8, 5, 8), (8, 8, 7))])  # fmt: skip
@pytest.mark.parametrize("outer", [1, 2])
def test_products_are_scattered_as_the_op_defines(
    form: str, left: tuple[int, ...], right: tuple[int, ...], outer: int
) -> None:
    factors = factor(*left), factor(*right, seed=1), factor(right[-1], seed=2)
    dim = {"rows": len(left) - 2, "columns": len(left) - 1, "matrices": 0}[form]
    product = Product.of(*factors, form, outer, 4)
    size = torch.Size(product.piece_shape).numel()
    owners = Owners(product.pieces, -(-size // 16), 16, torch.float32)
    scattered_call(product.left, product.right, product.bias, owners.destinations(1, product.strides), SMALL).run(2)
    pieces = [owners.memory[owner, 1].flatten()[:size].view(product.piece_shape) for owner in range(4)]
    assert_product(joined(torch.stack(pieces), dim, outer), *factors)


def test_a_sum_for_all_has_pieces_of_any_number_of_rows() -> None:
    factors = factor(2, 7, 8), factor(2, 8, 16, seed=1), factor(16, seed=2)
    product = Product.of_all(*factors, 4)
    owners = Owners(product.pieces, 4, 16, torch.float32)
    scattered_call(product.left, product.right, product.bias, owners.destinations(3, product.strides), SMALL).run(2)
    rows = owners.memory[:, 3, :4].flatten(0, 1)
    assert_product(rows[:14].view(2, 7, 16), *factors)
    assert bool(rows[14:].isnan().all())


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    pieces = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    out = torch.zeros(1)
    sum_call(pieces, out, torch.zeros(4, dtype=torch.int32), 0).run(1)
    assert out.item() == ((pieces[0] + pieces[1]) + pieces[2] + pieces[3]).item()
