"""Products scattered and summed, in Triton's interpreter: run by test_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpar.lowering.triton.launch import Sum, scattered_call
from fxpar.lowering.triton.pieces import Pieces, ring_from, row_tiles, signals_of_owner
from fxpar.lowering.triton.scatter import Product
from fxpar.lowering.triton.tiling import DTYPES, Tiling
from tests.lowering.triton.kernel_inputs import BY_DESCRIPTORS, SMALL, joined
from tests.lowering.triton.owners import Owners
from tests.lowering.triton.products import assert_product, factor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("owner", "outer", "rows", "terms", "columns"),
    [(0, 1, 16, 16, 16), (3, 1, 5, 19, 24), (1, 3, 7, 3, 8), (2, 2, 20, 8, 32)],
)
def test_a_scattered_product_is_summed_by_owners(
    dtype: torch.dtype, owner: int, outer: int, rows: int, terms: int, columns: int
) -> None:
    pieces = Pieces(outer, 4, rows)
    owners = Owners(pieces, outer * rows, columns, dtype)
    lefts = [factor(1, pieces.blocks * rows, terms, dtype=dtype, seed=rank) for rank in range(4)]
    rights = [factor(1, terms, columns, dtype=dtype, seed=10 + rank) for rank in range(4)]
    biases = [factor(columns, dtype=dtype, seed=20 + rank).expand(1, pieces.blocks * rows, -1) for rank in range(4)]
    out = torch.full((outer * rows, columns), torch.nan, dtype=dtype)
    total = Sum(owners.memory[owner].flatten(1), out)
    for rank in (*ring_from(owner, 4), owner):  # the interpreter runs one at a time: the owner, which waits, is last
        factors = lefts[rank], rights[rank], biases[rank]
        to = owners.destinations(rank, (columns, 1))
        scattered_call(*factors, to, SMALL, total if rank == owner else None).run(3)
        assert to.tickets.item() == 0
    ones = torch.ones(1, pieces.blocks * rows, 1)
    whole_left = torch.cat([*lefts, *[ones] * 4], dim=-1).double().view(outer, 4, rows, -1)
    whole_right = torch.cat([*rights, *[bias[:, :1] for bias in biases]], dim=-2).double()
    assert_scattered(out, whole_left[:, owner].flatten(0, 1), whole_right[0])
    if dtype != torch.bfloat16:  # to which the interpreter does not round, but truncates
        assert out.equal(sum_in_the_order_of_ranks(owners.memory[owner, :, :-1]))
    for other in range(4):
        assert owners.counters[other].tolist() == signals(owners, other, columns, are_summed=other == owner)
    assert bool(owners.memory[:, :, -1].isnan().all()), "a tile was stored outside of its piece"


def sum_in_the_order_of_ranks(pieces: Tensor) -> Tensor:
    """Added up in float32."""
    total = torch.zeros(pieces.shape[1:])
    for piece in pieces:
        total += piece.float()
    return total.to(pieces.dtype)


def signals(owners: Owners, owner: int, columns: int, *, are_summed: bool) -> list[int]:
    """What the counters of an owner are at the end."""
    pieces = owners.pieces
    if are_summed:
        return [0] * owners.counters.shape[1]
    rows = signals_of_owner(list(row_tiles(1, pieces.blocks * pieces.rows, SMALL.m)), pieces, owner, SMALL.m)
    found = [4 * count for count in rows for _ in range(-(-columns // SMALL.n))]
    return found + [0] * (owners.counters.shape[1] - len(found))


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


@pytest.mark.parametrize(
    ("form", "left", "right"),
    [
        ("rows", (24, 8), (8, 7)),
        ("rows", (3, 24, 8), (3, 8, 7)),
        ("columns", (5, 8), (8, 24)),
        ("matrices", (8, 5, 8), (8, 8, 7)),
    ],
)
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
    owners = Owners(Pieces(1, 4, 1), 1, 16, torch.float32)
    owners.memory[3, :, 0] = torch.tensor([[1e8], [1.0], [-1e8], [0.0]])
    owners.counters[3, 0] = 3
    out = torch.zeros(1, 16)
    total = Sum(owners.memory[3].flatten(1), out)
    scattered_call(torch.ones(1, 4, 1), torch.ones(1, 1, 16), None, owners.destinations(3, (16, 1)), SMALL, total).run(
        2
    )
    assert out[0, 0].item() == ((torch.tensor(1e8) + 1) - 1e8 + 1).item()


@pytest.mark.parametrize(("left", "right"), [((1, 24, 40), (1, 40, 33)), ((1, 4, 8), (1, 8, 16))])
def test_a_sum_of_transposed_pieces_has_their_strides(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    factors = factor(*left), factor(*right, seed=1)
    rows, columns = left[1], right[2]
    owners = Owners(Pieces(1, 1, rows), rows, columns + 15, torch.float32)
    out = torch.full((columns, rows), torch.nan)
    to = owners.destinations(0, (1, rows))
    scattered_call(*factors, None, to, SMALL, Sum(owners.memory[0].flatten(1), out)).run(2)
    assert_product(out.T, factors[0][0], factors[1][0])
