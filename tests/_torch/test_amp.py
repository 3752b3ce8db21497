"""Gradients are multiplied in place as `Tensor.mul_` does it, whatever their dtypes."""

from __future__ import annotations

import pytest
import torch

from fxpar._torch.amp import multiply_all

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_all_dtypes_are_multiplied(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    factor = torch.tensor(1 / 3, dtype=dtype)
    gradients = [torch.randn(size, dtype=each) for each in DTYPES for size in ((3, 5), (), (0, 2), (7,))]
    expected = [gradient.clone().mul_(factor) for gradient in gradients]
    multiply_all(gradients, factor)
    for found, wanted in zip(gradients, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert found.equal(wanted)


def test_without_gradients_nothing_happens() -> None:
    multiply_all([], torch.tensor(2.0))
