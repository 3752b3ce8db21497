"""Factors to multiply, and how far a product may be from the exact one."""

from __future__ import annotations

import torch
from torch import Tensor


def factor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, terms: int = 1) -> None:
    """found is left @ right + bias, summed in float32 and rounded to its dtype at most `terms` times.

    Errors are held against the magnitudes that were summed up.
    """
    exact, magnitude = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = terms * torch.finfo(found.dtype).eps * exact.abs() + left.shape[-1] * 2.0**-23 * magnitude
    bound += terms * torch.finfo(found.dtype).smallest_normal
    excess = (found.double() - exact).abs() - bound
    assert found.shape == exact.shape
    assert bool((excess <= 0).all()), f"off by {excess.max():.3g} more than rounding explains"
