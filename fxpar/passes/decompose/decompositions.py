"""Decompositions of the ops that shard better in parts. `DECOMPOSITIONS` is the table.

Sums and maxima over a sharded dim become partial values: a loss over a sharded vocabulary then needs no op of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.rules.call import parameters
from fxpar.rules.losses import LOSSES_OF_ELEMENTS, LOSSES_OF_ELEMENTS_BACKWARD, MEAN, NO_REDUCTION

aten = torch.ops.aten

_ROUNDED = (torch.float16, torch.bfloat16)


def add_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """addmm, baddbmm: the product is reduced before the bias is added, so the bias counts once."""
    product = torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)
    return _scaled(product, alpha) + _scaled(bias, beta)


def _scaled(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1 else value * factor


def mean(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum over all ranks, divided by the number of elements in the whole tensor."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    result_dtype = dtype or x.dtype
    return (precise(x.to(result_dtype)).sum(dims, keepdim) / count).to(result_dtype)


def _dims(x: Tensor, dim: Sequence[int] | None) -> list[int]:
    """The dims that are reduced: none given means all."""
    return list(dim) if dim else list(range(x.dim()))


def precise(x: Tensor) -> Tensor:
    """`x` in the precision in which kernels accumulate it."""
    return x.float() if x.dtype in _ROUNDED else x


def vector_norm(
    x: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum of powers, or the maximum, is a reduction: the root is taken of that of all ranks."""
    dims = _dims(x, dim)
    result_dtype = dtype or x.dtype
    sizes = precise(x.to(result_dtype)).abs()
    if math.isinf(order):
        return (sizes.amax(dims, keepdim) if order > 0 else sizes.amin(dims, keepdim)).to(result_dtype)
    if order == 0:
        return (sizes != 0).sum(dims, keepdim).to(result_dtype)
    return sizes.pow(order).sum(dims, keepdim).pow(1 / order).to(result_dtype)


def logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """The maximum and the sum of exponentials are reductions."""
    exact, dims = precise(x), _dims(x, dim)
    highest = exact.amax(dims, keepdim=True)
    highest = torch.where(highest.isinf(), 0.0, highest)
    logarithm = (exact - highest).exp().sum(dims, keepdim=True).log() + highest
    return (logarithm if keepdim else logarithm.squeeze(dims)).to(x.dtype)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """The maximum and the sum of exponentials are reductions."""
    exact = precise(x)
    shifted = exact - exact.amax(dim, keepdim=True)
    result = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return result if half_to_float else result.to(x.dtype)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """The gradient's sum is a reduction."""
    grad, output = precise(grad), precise(output)
    return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(input_dtype)


def nll_loss(
    log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Each row's target is picked by a mask, and the picked values are summed over the classes.

    Returns the loss, and the total weight of the targets that are not ignored.
    """
    hit = _hits(log_probs, target, ignore_index)
    weighted = log_probs if weight is None else log_probs * _along_classes(weight, log_probs)
    losses = -torch.where(hit, weighted, 0.0).sum(_class_dim(log_probs))
    if reduction == NO_REDUCTION:
        return losses, torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    total_weight = _total_weight(log_probs, target, weight, ignore_index)
    loss = losses.sum()
    return (loss / total_weight if reduction == MEAN else loss), total_weight


def nll_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Only the targets have a gradient."""
    row_grads = _row_gradients(grad, log_probs, reduction, total_weight)
    if weight is not None:
        row_grads = row_grads * _along_classes(weight, log_probs)
    return torch.where(_hits(log_probs, target, ignore_index), row_grads, 0.0)


def cross_entropy_backward(
    grad: Tensor,
    log_probs: Tensor,
    target: Tensor,
    weight: None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    *,
    input_dtype: torch.dtype,
) -> Tensor:
    """nll_loss_backward, then log_softmax_backward along the classes.

    The rows of the gradient between them have one entry each, so that their sums need no reduction.
    """
    row_grads = _row_gradients(grad, log_probs, reduction, total_weight)
    counts = (target != ignore_index).unsqueeze(_class_dim(log_probs))
    row_grads = torch.where(counts, row_grads, 0.0)
    picked = torch.where(_hits(log_probs, target, ignore_index), row_grads, 0.0)
    return (picked - precise(log_probs).exp() * row_grads).to(input_dtype)


def mse_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Squares, and their sum or mean."""
    return _reduced((x - target) * (x - target), reduction)


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    if reduction == NO_REDUCTION:
        return losses
    return mean(losses) if reduction == MEAN else losses.sum()


def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """The difference, scaled."""
    return (x - target) * (grad * (2 / x.numel() if reduction == MEAN else 2))


def loss_of_elements(loss: torch._ops.OpOverload) -> Callable[..., Tensor]:
    """Decompose a loss that treats each element by itself: the same without a reduction, and the reduction."""

    def decomposed(*args: Any, **kwargs: Any) -> Tensor:
        given = _by_name(loss, args, kwargs)
        return _reduced(loss(**given | {"reduction": NO_REDUCTION}), given["reduction"])

    return decomposed


def loss_of_elements_backward(backward: torch._ops.OpOverload) -> Callable[..., Tensor]:
    """Each element has a part of the gradient of the reduced loss."""

    def decomposed(*args: Any, **kwargs: Any) -> Tensor:
        given = _by_name(backward, args, kwargs)
        grad, x, reduction = (given[name] for name in ("grad_output", "self", "reduction"))
        if reduction == MEAN:
            grad = grad / x.numel()
        found: Tensor = backward(**given | {"grad_output": grad.expand_as(x), "reduction": NO_REDUCTION})
        return found

    return decomposed


def _by_name(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The op's arguments by the names of its parameters."""
    names = [parameter.name for parameter in parameters(op)]
    defaults = {parameter.name: parameter.default for parameter in parameters(op)}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _class_dim(log_probs: Tensor) -> int:
    return min(1, log_probs.dim() - 1)


def _along_classes(per_class: Tensor, log_probs: Tensor) -> Tensor:
    """One value per class, to be broadcast to `log_probs`."""
    return per_class.view(-1, *[1] * (log_probs.dim() - _class_dim(log_probs) - 1))


def _hits(log_probs: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Where a class is its row's target, and the row is not ignored; a mask of the shape of `log_probs`."""
    classes = torch.arange(log_probs.shape[_class_dim(log_probs)], device=target.device)
    rows = target.unsqueeze(_class_dim(log_probs))
    return (rows == _along_classes(classes, log_probs)) & (rows != ignore_index)


def _total_weight(log_probs: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    if weight is None:
        return (target != ignore_index).sum(dtype=torch.float32).to(log_probs.dtype)
    weights = precise(_along_classes(weight, log_probs))
    return torch.where(_hits(log_probs, target, ignore_index), weights, 0.0).sum().to(log_probs.dtype)


def _row_gradients(grad: Tensor, log_probs: Tensor, reduction: int, total_weight: Tensor) -> Tensor:
    """The gradient of each row's target, to be broadcast to `log_probs`."""
    if reduction == NO_REDUCTION:
        return -grad.unsqueeze(_class_dim(log_probs))
    return -grad / total_weight if reduction == MEAN else -grad


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """One op for the gradient of the input and one for that of the weight, since either may be needed earlier.

    Kernels compute the two separately, so nothing is computed twice. The gradient of the bias is a sum.
    """

    def gradient(index: int) -> Tensor:
        geometry, mask = (stride, padding, dilation, transposed, output_padding, groups), [i == index for i in range(3)]
        found: Tensor = aten.convolution_backward(grad, x, weight, None, *geometry, mask)[index]
        return found

    return (
        gradient(0) if output_mask[0] else None,
        gradient(1) if output_mask[1] else None,
        grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None,
    )


def weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """_weight_norm_interface: the norms over all other dims are roots of sums. Returns the weights and the norms."""
    norms = vector_norm(direction, 2, _other_dims(direction, dim), keepdim=True)
    return direction * (length / norms), norms


def weight_norm_backward(
    grad: Tensor, direction: Tensor, length: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """The gradients of directions and lengths: the part of `grad` across a direction turns it."""
    along = (grad * direction).sum(_other_dims(direction, dim), keepdim=True) / norms
    return (length / norms) * (grad - direction * (along / norms)), along


def _other_dims(x: Tensor, dim: int) -> list[int]:
    return [other for other in range(x.dim()) if other != dim % x.dim()]


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Views and a permutation: the channels may be sharded that stay channels."""
    *outer, channels, height, width = x.shape
    parts = x.reshape(*outer, channels // factor**2, factor, factor, height, width)
    order = [*range(len(outer) + 1), *(len(outer) + dim for dim in (3, 1, 4, 2))]
    return parts.permute(order).reshape(*outer, -1, height * factor, width * factor)


def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """As `pixel_shuffle`."""
    *outer, channels, height, width = x.shape
    parts = x.reshape(*outer, channels, height // factor, factor, width // factor, factor)
    order = [*range(len(outer) + 1), *(len(outer) + dim for dim in (2, 4, 1, 3))]
    return parts.permute(order).reshape(*outer, -1, height // factor, width // factor)


def filled(like: Tensor, size: Sequence[int], fill: float, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """new_full and similar ops: only the operand's dtype and device matter, so its layout must not."""
    return torch.full(size, fill, dtype=dtype or like.dtype, device=like.device)


def zeros(like: Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """new_zeros."""
    return torch.zeros(size, dtype=dtype or like.dtype, device=like.device)


def ones(like: Tensor, size: Sequence[int], **options: Any) -> Tensor:
    """new_ones."""
    return filled(like, size, 1, **options)


def tangent_of_zeros(size: Sequence[int], **options: Any) -> Tensor:
    """_efficientzerotensor: what forward-mode AD returns has no memory, and generated code would read it."""
    made: Tensor = aten.zeros.default(size, **options)
    return made


def cleared(value: Tensor) -> Tensor:
    """zero, which `zero_` becomes."""
    return torch.zeros_like(value)


def one_by_one(op: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """What `_foreach_` ops do, by the `op` of one tensor: other lists have an element for each tensor, too."""

    def decomposed(tensors: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
        return [
            op(tensor, *(other[i] if isinstance(other, list | tuple) else other for other in others), **options)
            for i, tensor in enumerate(tensors)
        ]

    return decomposed


_OF_LISTS = (
    *("add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max", "lerp"),
    *("abs", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "clone"),
)
"""The ops that have a `_foreach_` variant which takes what they take."""


def _of_lists() -> dict[Callable[..., Any], Callable[..., Any]]:
    variants = {name: getattr(aten, f"_foreach_{name}") for name in _OF_LISTS}
    return {
        getattr(variant, overload): one_by_one(getattr(aten, name))
        for name, variant in variants.items()
        for overload in variant.overloads()
        if overload in ("default", "Scalar", "List", "ScalarList", "Tensor")
    }


DECOMPOSITIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.addmm.default: add_product,
    aten.baddbmm.default: add_product,
    aten._efficientzerotensor.default: tangent_of_zeros,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.logsumexp.default: logsumexp,
    aten._log_softmax.default: log_softmax,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    **{loss: loss_of_elements(loss) for loss in LOSSES_OF_ELEMENTS},
    **{backward: loss_of_elements_backward(backward) for backward in LOSSES_OF_ELEMENTS_BACKWARD},
    aten.convolution_backward.default: convolution_backward,
    aten._weight_norm_interface.default: weight_norm,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten.pixel_shuffle.default: pixel_shuffle,
    aten.pixel_unshuffle.default: pixel_unshuffle,
    aten.new_full.default: filled,
    aten.new_zeros.default: zeros,
    aten.new_ones.default: ones,
    aten.zero.default: cleared,
    **_of_lists(),
}
"""Each op's decomposition takes the op's own arguments."""
