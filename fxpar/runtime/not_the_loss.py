"""Results that require grad in the model, but are not the loss of the step: a backward through them is an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.errors import NotTheLossError


def refuse_backward(result: Tensor, name: str, loss: str) -> Tensor:
    """`result` with requires_grad; a backward through it raises NotTheLossError with its name and the loss's."""
    refused: Tensor = _NoGradient.apply(  # type: ignore[no-untyped-call]
        result, name, loss, torch.zeros((), device="cpu", requires_grad=True)
    )
    return refused


class _NoGradient(torch.autograd.Function):
    """The identity; it has no gradient."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, name: str, loss: str, requires_grad: Tensor) -> Tensor:
        ctx.names = name, loss
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotTheLossError(*ctx.names)
