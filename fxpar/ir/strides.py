"""Strides of tensors: the order of dims in memory, and whether there are gaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stride_order(whole: Tensor) -> tuple[int, ...]:
    """The dims of `whole` from the outermost in memory to the innermost; for an expanded value, as in a copy."""
    strides = torch.empty_like(whole).stride() if 0 in whole.stride() else whole.stride()
    return tuple(sorted(range(whole.dim()), key=lambda dim: -strides[dim]))


def is_dense(whole: Tensor) -> bool:
    """Whether the elements of `whole` fill a range of memory without gaps or overlaps, in any order of dims."""
    return lies_in_order(whole, stride_order(whole))


def lies_in_order(found: Tensor, order: Sequence[int]) -> bool:
    """Whether the stride order of `found` is `order`, outermost first, without gaps or overlaps."""
    step = 1
    for dim in reversed(order):
        if found.shape[dim] != 1 and found.stride(dim) != step:
            return found.numel() == 0
        step *= found.shape[dim]
    return True


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose stride order is `order`, outermost first."""
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return sorted(range(len(order)), key=lambda position: order[position])


def unfilled_like(like: Tensor) -> Tensor:
    """An uninitialised tensor of the shape, strides, dtype and device of a real or fake one."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def strided_like(found: Tensor, expected: Tensor) -> Tensor:
    """`found` in the stride order of `expected`, on which later views may rely."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), f"{found} in the place of {expected}"
    if found.stride() == expected.stride():
        return found
    order = stride_order(expected)
    return found.permute(order).contiguous().permute(inverse(order))
