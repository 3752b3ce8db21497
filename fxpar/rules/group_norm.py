"""Notation and local form of group norm: whole groups may be sharded."""

from __future__ import annotations

import torch
from torch import fx

from fxpar.ir import node_meta
from fxpar.rules.call import argument
from fxpar.rules.einsum import Dim, Einsum
from fxpar.rules.local_shapes import call_with, in_logical_order
from fxpar.rules.rule import LocalOp, OpCall

aten = torch.ops.aten
Dims = tuple[Dim | None, ...]


def group_norm(call: OpCall) -> Einsum:
    """native_group_norm: x [batch, channels, ...], a weight and a bias per channel; statistics are per group."""
    x, channels, statistics = _patterns(call)
    return Einsum((x, *[channels] * (len(call.inputs) - 1)), (x, statistics, statistics))


def group_norm_backward(call: OpCall) -> Einsum:
    """native_group_norm_backward: gradients of weight and bias are sums over the batch."""
    x, channels, statistics = _patterns(call)
    weight = [channels] * (len(call.inputs) - 4)
    return Einsum((x, x, statistics, statistics, *weight), (x, channels, channels))


def _patterns(call: OpCall) -> tuple[Dims, Dims, Dims]:
    """The patterns of x, of the tensors with a value per channel, and of the statistics."""
    batch, groups = Dim("b"), Dim("g", values=argument(call, "group"))
    return (batch, groups, *(None,) * (len(call.inputs[0]) - 2)), (groups,), (batch, groups)


def emit_group_norm(local: LocalOp) -> fx.Node:
    """native_group_norm of local sizes; its kernels assume dense operands."""
    return _emit(local, "input", "weight", "bias")


def emit_group_norm_backward(local: LocalOp) -> fx.Node:
    """native_group_norm_backward of local sizes; its kernels assume dense operands."""
    return _emit(local, "grad_out", "input", "mean", "rstd", "weight")


def _emit(local: LocalOp, *operands: str) -> fx.Node:
    channels, (batch, local_channels, *_) = local.call.inputs[0][1], local.input_shape(0)
    group = argument(local.call, "group") * local_channels // channels
    given = [name for name in operands if argument(local.call, name) is not None]
    dense = {name: _dense(local, name) for name in given}
    return call_with(local, N=batch, C=local_channels, group=group, **dense)


def _dense(local: LocalOp, name: str) -> fx.Node:
    """An operand as kernels need it: contiguous, or in channels-last order."""
    value, logical = in_logical_order(local, name), node_meta.tensor(argument(local.call, name))
    if logical.dim() < 4 or logical.is_contiguous() or local.input_shape(0)[0] > 1:
        return value
    # Kernels tell these orders by strides even for a batch of one, where views may differ from their fake tensors.
    channels_last = torch.channels_last if logical.dim() == 4 else torch.channels_last_3d
    return local.emit(aten.clone.default, value, memory_format=channels_last)
