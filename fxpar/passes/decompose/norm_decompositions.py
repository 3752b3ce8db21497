"""Decompositions of norms into sums and pointwise ops, so that the dims that they normalise can be sharded.

Each rank then sends statistics of rows instead of rows. Variances take two passes, and sums have at least 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.passes.decompose.decompositions import precise

aten = torch.ops.aten


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """native_layer_norm: the result, and the mean and reciprocal standard deviation of each row."""
    mean, rstd = _statistics(precise(x), _last_dims(x, shape), eps)
    normal = (precise(x) - mean) * rstd
    return _affine(normal, weight, bias).to(x.dtype), mean, rstd


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """native_layer_norm_backward: gradients of x, weight and bias, None where they are not wanted."""
    rstd, dims = precise(rstd), _last_dims(x, shape)
    normal = (precise(x) - precise(mean)) * rstd
    scaled = _affine(precise(grad), weight)
    sums = _sums(scaled, scaled * normal, dims)
    gradients = _gradient(scaled, normal, rstd, sums, math.prod(shape)), *_of_affine(precise(grad), normal, dims)
    return _wanted(gradients, (x, weight, bias), output_mask)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """_fused_rms_norm: the result, and the reciprocal root of each row's mean square."""
    exact = precise(x)
    eps = torch.finfo(exact.dtype).eps if eps is None else eps
    rstd = (_mean(exact * exact, _last_dims(x, shape)) + eps).rsqrt()
    return _affine(exact * rstd, weight).to(x.dtype), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """_fused_rms_norm_backward: gradients of x and weight, None where they are not wanted."""
    rstd, dims = precise(rstd), _last_dims(x, shape)
    normal = precise(x) * rstd
    scaled = _affine(precise(grad), weight)
    dx = rstd * (scaled - normal * _mean(scaled * normal, dims))
    dw, _ = _of_affine(precise(grad), normal, dims)
    return _wanted((dx, dw), (x, weight), output_mask)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_rows: int,
    num_channels: int,
    num_pixels: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """native_group_norm of x [batch, channels, ...]: the result, and mean and reciprocal std. deviation per group."""
    grouped = _grouped(precise(x), groups)
    mean, rstd = _statistics(grouped, _group_dims(grouped), eps)
    normal = (grouped - mean) * rstd
    result = _affine(normal, _per_channel(weight, grouped), _per_channel(bias, grouped))
    flat = num_rows, groups
    return result.reshape(x.shape).to(x.dtype), mean.reshape(flat), rstd.reshape(flat)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    num_rows: int,
    num_channels: int,
    num_pixels: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """native_group_norm_backward: gradients of x, weight and bias, None where they are not wanted.

    The sums of a group add up those of its channels, which the gradients of weight and bias need anyway.
    """
    grouped, grads = _grouped(precise(x), groups), _grouped(precise(grad), groups)
    one_per_group = (num_rows, groups, *[1] * (grouped.dim() - 2))
    rstd = precise(rstd).reshape(one_per_group)
    normal = (grouped - precise(mean).reshape(one_per_group)) * rstd
    pixels, per_channel = list(range(3, grouped.dim())), _per_channel(weight, grouped)
    of_bias, of_weight = (_sum(value, pixels) for value in (grads, grads * normal))
    sums = _sums(_affine(of_bias, per_channel), _affine(of_weight, per_channel), [2])
    dx = _gradient(_affine(grads, per_channel), normal, rstd, sums, num_channels // groups * num_pixels)
    gradients = dx.reshape(x.shape), *(value.sum(0).reshape(num_channels) for value in (of_weight, of_bias))
    return tuple(g.to(x.dtype) if wanted else None for g, wanted in zip(gradients, output_mask, strict=True))


def _last_dims(x: Tensor, shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(shape), x.dim()))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """x [batch, channels, ...] as [batch, groups, channels of a group, ...]."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _group_dims(grouped: Tensor) -> list[int]:
    return list(range(2, grouped.dim()))


def _per_channel(value: Tensor | None, grouped: Tensor) -> Tensor | None:
    """One value per channel, to be broadcast to the channels by group."""
    return None if value is None else value.reshape(*grouped.shape[1:3], *[1] * (grouped.dim() - 3))


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims, keepdim=True) if dims else x


def _mean(x: Tensor, dims: list[int]) -> Tensor:
    return _sum(x, dims) / math.prod(x.shape[dim] for dim in dims)


def _statistics(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation, in two passes: a difference of large sums would lose small deviations."""
    mean = _mean(x, dims)
    centered = x - mean
    return mean, (_mean(centered * centered, dims) + eps).rsqrt()


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    scaled = normal if weight is None else normal * precise(weight)
    return scaled if bias is None else scaled + precise(bias)


def _sums(first: Tensor, second: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """The sums of two values over `dims`, stacked, so that one reduction over ranks serves both."""
    both = torch.stack([_sum(first, dims), _sum(second, dims)])
    one, other = both.unbind(0)
    return one, other


def _gradient(scaled: Tensor, normal: Tensor, rstd: Tensor, sums: tuple[Tensor, Tensor], count: int) -> Tensor:
    """The gradient of the norm's input: `scaled` without its components along the mean and the deviation, by `rstd`."""
    of_mean, of_deviation = sums
    return rstd * (scaled - (of_mean + normal * of_deviation) / count)


def _of_affine(grad: Tensor, normal: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, which have the dims `dims`."""
    rows = list(range(dims[0]))
    return (grad * normal).sum(rows) if rows else grad * normal, grad.sum(rows) if rows else grad


def _wanted(
    gradients: Sequence[Tensor], operands: Sequence[Tensor | None], output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    return tuple(
        gradient.to(operand.dtype) if wanted and operand is not None else None
        for gradient, operand, wanted in zip(gradients, operands, output_mask, strict=True)
    )


LAYER_NORMS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
}
"""Norms over the last dims of a value."""

GROUP_NORMS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
}
"""Norms over groups of channels."""

NORMS = {**LAYER_NORMS, **GROUP_NORMS}
"""Each norm's decomposition takes the op's own arguments."""
