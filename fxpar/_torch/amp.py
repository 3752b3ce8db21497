"""The private PyTorch names behind mixed precision. Seen in torch 2.13."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["enter_autocast", "exit_autocast", "multiply_all", "multiply_each", "update_scale"]


def multiply_each(gradients: Iterable[Tensor], factor: Tensor, overflow: Tensor) -> None:
    """Multiply gradients by the float `factor` in place; `overflow` becomes 1.0 if one is not finite."""
    for own in _of_dtypes(gradients).values():
        torch._amp_foreach_non_finite_check_and_unscale_(own, overflow, factor)


def multiply_all(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by `factor` (0-dim, on their device) in place; on a GPU, with few kernels for all of them.

    `_foreach_mul_` has one kernel for many tensors only if `factor` is of their dtype: a float factor on gradients in
    half precision, which would lose digits in theirs, takes one for each.
    """
    for dtype, own in _of_dtypes(gradients).items():
        if factor.dtype is torch.float32 and dtype in (torch.float16, torch.bfloat16):
            multiply_each(own, factor, torch.zeros_like(factor))
        else:
            torch._foreach_mul_(own, factor)


def _of_dtypes(gradients: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """One kernel takes gradients of one dtype."""
    found: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        found[gradient.dtype].append(gradient)
    return found


def update_scale(
    scale: Tensor, good_steps: Tensor, overflow: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Multiply `scale` in place: by `backoff` after an overflow, by `growth` after `interval` steps without one."""
    torch._amp_update_scale_(scale, good_steps, overflow, growth, backoff, interval)
