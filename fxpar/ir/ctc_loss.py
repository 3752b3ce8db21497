"""CTC losses as an op of known shapes: those of PyTorch's own op depend on the lengths of the targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("fxpar::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The CTC loss of each sample, (batch), from `log_probs` (time, batch, classes) and `targets` (batch, length)."""
    losses: Tensor = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    return losses.masked_fill(losses.isinf(), 0.0) if zero_infinity else losses


@torch.library.custom_op("fxpar::ctc_losses_backward", mutates_args=())
def ctc_losses_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of `log_probs`; the losses are computed once more, since what they save has no known shape."""
    given = log_probs, targets, input_lengths, target_lengths
    losses, log_alpha = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    found: Tensor = aten._ctc_loss_backward.Tensor(gradient, *given, losses, log_alpha, blank, zero_infinity)
    return found


@ctc_losses.register_fake
def _losses_fake(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_losses_backward.register_fake
def _backward_fake(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.fxpar.ctc_losses_backward(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return (found, None, None, None, None, None)


ctc_losses.register_autograd(_differentiate, setup_context=_save)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """As `torch.nn.functional.ctc_loss`, which traces call this in its place; shapes as of `ctc_losses`."""
    if log_probs.dim() == 2:  # one sample
        of_one = ctc_loss(
            log_probs.unsqueeze(1), targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
        return of_one.squeeze(0) if reduction == "none" else of_one
    inputs = torch.as_tensor(input_lengths, device=log_probs.device).reshape(-1)
    lengths = torch.as_tensor(target_lengths, device=log_probs.device).reshape(-1)
    losses: Tensor = torch.ops.fxpar.ctc_losses(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


def rows_of_selected(labels: Tensor, mask: Tensor) -> Tensor:
    """In each row of `labels` (batch, length), first those where `mask` is true, in their order, then the others."""
    return labels.gather(1, mask.logical_not().long().argsort(dim=1, stable=True))
