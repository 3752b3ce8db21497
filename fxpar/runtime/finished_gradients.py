"""The gradients of a step that has run, until a backward takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar._torch.amp import multiply_all
from fxpar.errors import SecondDerivativeError


class FinishedGradients:
    """A step's finished gradients, held until `.backward()` takes them, once.

    Args:
        local: this rank's pieces, by parameter, in the order of the leaves.
        whole: makes the gradient of a parameter from its name and this rank's piece.
        of_inputs: the gradients of inputs.
    """

    def __init__(
        self, local: Mapping[str, Tensor], whole: Callable[[str, Tensor], DTensor], of_inputs: Sequence[Tensor]
    ) -> None:
        self._local: Mapping[str, Tensor] | None = local
        self._whole, self._of_inputs = whole, of_inputs

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return list(self._local or {})

    def take(self, factor: Tensor | None = None) -> list[Tensor]:
        """The gradients, times `factor`, of the parameters in the order of the leaves, then of the inputs."""
        if self._local is None:
            raise RuntimeError(
                "backward through this loss ran already: a step's gradients are returned once; run the step again"
            )
        local, self._local = self._local, None
        of_inputs, self._of_inputs = self._of_inputs, ()
        # On a GPU, reading the factor would wait for all kernels of the step.
        if factor is not None and (factor.device.type != "cpu" or factor.item() != 1.0):
            multiply_all([*local.values(), *of_inputs], factor)
        return [*(self._whole(name, piece) for name, piece in local.items()), *of_inputs]


def connect(loss: Tensor, gradients: FinishedGradients, anchor: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """The loss, a backward from which takes the gradients for the leaves; `anchor` requires grad where no leaf does."""
    connected: Tensor = _ReturnGradients.apply(loss, gradients, anchor, *leaves)  # type: ignore[no-untyped-call]
    return connected


class _ReturnGradients(torch.autograd.Function):
    """Connects the loss to the parameters in autograd: its backward returns gradients that are already computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: FinishedGradients, anchor: Tensor, *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        return (None, None, None, *ctx.gradients.take(factor))


def check_first_derivative() -> None:
    """Check, in a backward, that what it returns is not to be differentiated: autograd would take it for constant.

    Raises:
        SecondDerivativeError: it was called with create_graph=True.
    """
    if torch.is_grad_enabled():
        raise SecondDerivativeError
