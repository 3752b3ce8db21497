"""Products reach their place, whatever its strides are and however many rows they have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpar.lowering.cpu.multiply import SharedFactor, SumOfProducts, multiply, multiply_one, product_shape


@pytest.mark.parametrize("rows", [2, 50])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("batch", [(), (4,)])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_each_product_is_written_to_its_place(
    rows: int, is_shared: bool, batch: tuple[int, ...], is_transposed: bool
) -> None:
    left = torch.randn(3, *batch, rows, 8)
    right = torch.randn(*(() if is_shared else (3,)), *batch, 8, 5)
    bias = torch.randn(5)
    memory = torch.full((3, *batch, 5, 2 * rows) if is_transposed else (3, *batch, 2 * rows, 5), torch.nan)
    out = memory[..., :rows].mT if is_transposed else memory[..., :rows, :]
    multiply(out, left, SharedFactor(right) if is_shared else right, bias)
    torch.testing.assert_close(out, left @ right + bias)
    assert memory.isnan().sum() == out.numel(), "and nowhere else"


def test_one_matrix_multiplies_a_batch() -> None:
    left, right = torch.randn(2, 3, 40, 8), torch.randn(8, 5)
    out = torch.empty(2, 3, 40, 5)
    multiply(out, left, SharedFactor(right), None)
    torch.testing.assert_close(out, left @ right)
    assert product_shape(left[0], right) == [3, 40, 5]


def stored(rows: int, columns: int, order: str) -> Tensor:
    """A random matrix whose rows or columns are dense in memory, within a larger one, or neither are."""
    larger = torch.randn(rows + 3, columns + 5)[1:-2, 2:-3] if order != "columns" else torch.randn(columns, rows + 3).T
    return torch.randn(rows, 2 * columns)[:, ::2] if order == "neither" else larger[:rows]


ORDERS = ["rows", "columns", "neither"]


@pytest.mark.parametrize("of_out", ORDERS)
@pytest.mark.parametrize("of_left", ORDERS)
@pytest.mark.parametrize("of_right", ORDERS)
def test_a_shared_factor_multiplies_however_matrices_lie_in_memory(of_out: str, of_left: str, of_right: str) -> None:
    factor = SharedFactor(right := stored(40, 36, of_right))
    for rows in (64, 33, 64):
        left, out = stored(rows, 40, of_left), stored(rows, 36, of_out).fill_(torch.nan)
        factor.multiply(out[None], left[None])
        torch.testing.assert_close(out, left @ right)


def test_a_shared_factor_multiplies_to_the_bits_of_torch_so_that_processes_agree() -> None:
    left, right, out = torch.randn(3, 128, 1024), torch.randn(256, 1024).t(), torch.empty(3, 128, 256)
    SharedFactor(right).multiply(out, left)
    assert all(torch.equal(product, torch.mm(rows, right)) for product, rows in zip(out, left, strict=True))


@pytest.mark.parametrize("adds", [True, False])
def test_a_product_much_wider_than_high_is_computed_in_blocks_of_columns(adds: bool) -> None:
    left, right, out = torch.randn(3, 2), torch.randn(2, 5000), torch.randn(3, 5000)
    expected = left @ right + (out if adds else 0)
    multiply_one(out, left, right, adds=adds)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_are_added_up_as_floats(dtype: torch.dtype) -> None:
    out = torch.full((4, 5), torch.nan, dtype=dtype)
    total = SumOfProducts(out)
    lefts = torch.full((1000, 4, 1), 1.0, dtype=dtype)
    right = torch.full((1, 5), 1.0, dtype=dtype)
    for left in lefts:
        total.add(left, right)
    total.finish()
    assert out.eq(1000).all(), "in bfloat16, 256 + 1 is 256"
