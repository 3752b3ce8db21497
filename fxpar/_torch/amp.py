"""The private PyTorch names behind mixed precision. Seen in torch 2.13."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["enter_autocast", "exit_autocast", "multiply_each", "update_scale"]


def multiply_each(gradients: Sequence[Tensor], factor: Tensor, overflow: Tensor) -> None:
    """Multiply gradients of one dtype by the float `factor` in place; `overflow` becomes 1.0 if one is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), overflow, factor)


def update_scale(
    scale: Tensor, good_steps: Tensor, overflow: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Multiply `scale` in place: by `backoff` after an overflow, by `growth` after `interval` steps without one."""
    torch._amp_update_scale_(scale, good_steps, overflow, growth, backoff, interval)
