"""Notation and local form of convolutions, of any number of dims, transposed or not."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.ir.layout import Shard
from fxpar.rules.call import argument, local_argument
from fxpar.rules.einsum import Dim, Einsum, Pattern
from fxpar.rules.local_shapes import call_with
from fxpar.rules.rule import LocalOp, OpCall


def convolution(call: OpCall) -> Einsum:
    """convolution: batch and output channels may be sharded; sharded input channels make partial sums."""
    x, weight, y = _patterns(call)
    bias = [] if argument(call, "bias") is None else [_channels(y)]
    return Einsum((x, weight, *bias), (y,))


def convolution_backward(call: OpCall) -> Einsum:
    """convolution_backward: as the forward. Of the operand whose gradient is computed, only the shape is used."""
    x, weight, y = _patterns(call)
    if argument(call, "output_mask")[2]:
        # With sharded input channels every rank would make the whole gradient of the bias: a sum would be too large.
        x, weight = (tuple(d if d and d.letter != "i" else None for d in pattern) for pattern in (x, weight))
    return Einsum((y, x, weight), (x, weight, _channels(y)))


def _patterns(call: OpCall) -> tuple[tuple[Dim | None, ...], tuple[Dim | None, ...], tuple[Dim | None, ...]]:
    """The patterns of x [batch, channels, ...], of the weight, and of y; spatial dims are whole."""
    groups: int = argument(call, "groups")
    moved = (None,) * (len(call.inputs[0]) - 2)
    taken, given = Dim("i"), Dim("o")
    if groups > 1:  # ranks have whole groups: of input channels, of rows of the weight, of output channels
        taken = given = Dim("g", values=groups)
        kernels: tuple[Dim | None, ...] = (given, None)
    else:
        kernels = (taken, given) if argument(call, "transposed") else (given, taken)
    batch = Dim("b")
    return (batch, taken, *moved), (*kernels, *moved), (batch, given, *moved)


def _channels(pattern: tuple[Dim | None, ...]) -> Pattern:
    return (pattern[1],)


def emit_convolution(local: LocalOp) -> fx.Node:
    """convolution of the local groups; among ranks with partial sums over input channels, one adds the bias."""
    x = local.inputs[0]
    replaced: dict[str, Any] = _local_groups(local, x_operand=0)
    if argument(local.call, "groups") == 1 and any(
        isinstance(placement, Shard) and placement.dim == 1 and local.coordinate[axis] > 0 for axis, placement in x.axes
    ):
        replaced["bias"] = None
    return call_with(local, **replaced)


def emit_convolution_backward(local: LocalOp) -> fx.Node:
    """convolution_backward of the local groups, with a bias for each local output channel."""
    replaced: dict[str, Any] = _local_groups(local, x_operand=1)
    if local_argument(local, "bias_sizes") is not None:
        replaced["bias_sizes"] = [local.input_shape(0)[1]]
    return call_with(local, **replaced)


def _local_groups(local: LocalOp, x_operand: int) -> dict[str, Any]:
    groups: int = argument(local.call, "groups")
    channels, local_channels = local.call.inputs[x_operand][1], local.input_shape(x_operand)[1]
    return {"groups": groups * local_channels // channels if groups > 1 else 1}
