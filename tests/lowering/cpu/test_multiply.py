"""Products reach their place, whatever its strides are and however many rows they have."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fxpar._torch import packed_sgemm
from fxpar.lowering.cpu import packed, shared_factor
from fxpar.lowering.cpu.multiply import SumOfProducts, multiply, product_shape
from fxpar.lowering.cpu.one_product import multiply_one
from fxpar.lowering.cpu.shared_factor import SharedFactor


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
NEEDS_MKL = pytest.mark.skipif(packed_sgemm() is None, reason="this torch has no MKL")


@pytest.fixture(params=[False, pytest.param(True, marks=NEEDS_MKL)], ids=["plain", "packed"])
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether factors are packed, on whatever processor this is."""
    monkeypatch.setattr(shared_factor, "packing_mkl", packed_sgemm if request.param else lambda: None)


@pytest.mark.parametrize("of_out", ORDERS)
@pytest.mark.parametrize("of_left", ORDERS)
@pytest.mark.parametrize("of_right", ORDERS)
@pytest.mark.usefixtures("packs")
def test_a_shared_factor_multiplies_however_matrices_lie_in_memory(of_out: str, of_left: str, of_right: str) -> None:
    factor = SharedFactor(right := stored(40, 36, of_right))
    for rows in (64, 33, 64):
        left, out = stored(rows, 40, of_left), stored(rows, 36, of_out).fill_(torch.nan)
        factor.multiply(out[None], left[None])
        torch.testing.assert_close(out, left @ right)


@NEEDS_MKL
def test_a_large_shared_factor_is_packed_once_for_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_factor, "packing_mkl", packed_sgemm)
    factor = SharedFactor(torch.randn(40, 36))
    out, left = torch.empty(4, 64, 36), torch.randn(4, 64, 40)
    factor.multiply(out[:1], left[:1])
    monkeypatch.setattr(packed_sgemm(), "cblas_sgemm_pack", None)
    factor.multiply(out, left)
    with pytest.raises(TypeError):
        factor.multiply(out[:, 1:], left[:, 1:])


@NEEDS_MKL
@pytest.mark.parametrize(("of_packed", "of_plain", "packs"), [(1.0, 2.0, True), (1.0, 1.0, False), (2.0, 1.0, False)])
def test_factors_are_packed_where_that_is_clearly_faster(
    of_packed: float, of_plain: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.cycle([of_packed, of_plain])
    monkeypatch.setattr(packed, "_seconds", lambda work: (work(), next(times))[1])
    assert (packed.packing_mkl.__wrapped__() is not None) == packs


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
