"""A distributed model keeps its device and types: its step is planned for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import ConvertedModelError


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """As that of the module's own class, by which `to`, `half`, `cuda` and others convert all tensors of a module.

    Raises:
        ConvertedModelError: a parameter would have another type, or be on another device.
    """
    for dtype, device_type in dict.fromkeys((p.dtype, p.device.type) for p in self.parameters(recurse)):
        _check(type(self).__name__, fn, torch.empty(0, dtype=dtype, device=device_type))
    applied: nn.Module = type(self).__mro__[1]._apply(self, fn, recurse)  # type: ignore[attr-defined]
    return applied


def _check(model: str, fn: Callable[[Tensor], Tensor], before: Tensor) -> None:
    after = fn(before)
    if (after.dtype, after.device) != (before.dtype, before.device):
        raise ConvertedModelError(model, *(f"{each.dtype} on {each.device.type}" for each in (before, after)))


CHECKED_CONVERSIONS: Mapping[str, Any] = {"_apply": _apply}
"""What the class of a module gets."""
