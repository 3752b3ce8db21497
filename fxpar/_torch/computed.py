"""Fake values that require a gradient as results do: they may be changed in place, which leaves may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def as_computed(value: Tensor) -> Tensor:
    """A value that requires a gradient in the memory of `value`, of which autograd does not take it for a view."""
    with torch.enable_grad():
        leaf = value.new_empty((), requires_grad=True)
        found: Tensor = _Computed.apply(leaf, [value.detach()])  # type: ignore[no-untyped-call]
    return found


class _Computed(torch.autograd.Function):
    """Depends on its first argument and returns the content of the second."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, contents: Sequence[Tensor]) -> Tensor:
        return contents[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("a fake value is not differentiated")
