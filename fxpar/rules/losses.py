"""Losses that treat each element by itself. With a reduction they have no rule: decomposed, they are without one."""

from __future__ import annotations

import torch

from fxpar.rules.call import argument
from fxpar.rules.einsum import Einsum
from fxpar.rules.notations import pointwise
from fxpar.rules.rule import OpCall

aten = torch.ops.aten

NO_REDUCTION, MEAN, SUM = 0, 1, 2
"""ATen's numbers for the reductions of a loss."""

LOSSES_OF_ELEMENTS = (
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.huber_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
)
LOSSES_OF_ELEMENTS_BACKWARD = (
    aten.binary_cross_entropy_backward.default,
    aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss_backward.default,
)


def loss_of_elements(call: OpCall) -> Einsum | None:
    """Such a loss, or its gradient: pointwise if nothing is reduced."""
    return pointwise(call) if argument(call, "reduction") == NO_REDUCTION else None
