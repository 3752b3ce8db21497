"""Sums of tensors in a fixed order: csrc/sum.cpp."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxpar.core.library import function


def add_up(terms: Tensor, out: Tensor) -> None:
    """Let `out` be the sum over the first dim of `terms`, one or more, in their order; halves are added up as floats.

    Args:
        terms: (terms, *out.shape), whatever its strides.
    """
    if _is_plain(out) and _is_plain(terms[0]):
        _sum()(out.data_ptr(), terms.data_ptr(), len(terms), terms.stride(0), out.numel())
        return
    total = total_of(out).copy_(terms[0])
    for term in terms[1:]:
        total += term
    if total is not out:
        out.copy_(total)


def total_of(out: Tensor) -> Tensor:
    """Where to keep what is to become the sum `out`: floats for halves, which would round at each term, or `out`."""
    is_half = out.is_floating_point() and out.dtype.itemsize < torch.float32.itemsize
    return torch.empty_like(out, dtype=torch.float32) if is_half else out


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


@cache
def _sum() -> Any:
    return function("fxpar_sum", None, c_void_p, c_void_p, c_int64, c_int64, c_int64)
