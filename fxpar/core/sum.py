"""Sums of tensors in a fixed order: csrc/sum.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxpar.core.library import function


def add_up(terms: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of `terms`, one or more, to `out`, added in their order; 16-bit floats are summed in float32.

    Args:
        terms: each of the shape of `out`, with any strides; one may be `out` itself.
    """
    # The core only knows the size of `out`, and would read past the end of a smaller term.
    assert all(term.shape == out.shape for term in terms), f"{[*map(_shape, terms)]} to a sum of shape {_shape(out)}"
    if all(map(_is_plain, (out, *terms))):
        addresses = (c_void_p * len(terms))(*(term.data_ptr() for term in terms))
        _sum()(out.data_ptr(), addresses, len(terms), out.numel())
        return
    total = terms[0].to(total_dtype(out.dtype), copy=True)  # not in `out`, which may be a later term
    for term in terms[1:]:
        total += term
    out.copy_(total)


def reduce_terms(terms: Sequence[Tensor], reduction: str, out: Tensor) -> None:
    """Write the sum, as `add_up`, or the maximum of `terms` to `out`, which may be one of them."""
    if reduction == "sum":
        add_up(terms, out)
        return
    assert reduction == "max", f"a reduction by {reduction}"
    out.copy_(torch.stack(list(terms)).amax(0))


def total_of(out: Tensor) -> Tensor:
    """The accumulator for the sum `out`: `out` itself, or a new tensor of its `total_dtype`."""
    dtype = total_dtype(out.dtype)
    return out if dtype == out.dtype else torch.empty_like(out, dtype=dtype)


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators: float32 for smaller floats, which would round at each term."""
    is_half = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    return torch.float32 if is_half else dtype


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


@cache
def _sum() -> Any:
    return function("fxpar_sum", None, c_void_p, POINTER(c_void_p), c_int64, c_int64)
