"""Products reach their place, whatever its strides are and however many rows they have."""

from __future__ import annotations

import pytest
import torch

from fxpar.lowering.cpu.multiply import SumOfProducts, multiply, product_shape


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
    multiply(out, left, right, bias)
    torch.testing.assert_close(out, left @ right + bias)
    assert memory.isnan().sum() == out.numel(), "and nowhere else"


def test_one_matrix_multiplies_a_batch() -> None:
    left, right = torch.randn(2, 3, 40, 8), torch.randn(8, 5)
    out = torch.empty(2, 3, 40, 5)
    multiply(out, left, right, None)
    torch.testing.assert_close(out, left @ right)
    assert product_shape(left[0], right) == [3, 40, 5]


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
