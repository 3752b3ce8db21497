"""The local form of ops whose values are logical indices, and of one that needs dense operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from fxpar.ir.layout import Digit, Layout
from fxpar.rules.call import argument, has_parameter, local_argument
from fxpar.rules.einsum_rule import call_as_is
from fxpar.rules.local_shapes import call_with, in_logical_order
from fxpar.rules.rule import LocalOp

aten = torch.ops.aten


def emit_arange(local: LocalOp) -> fx.Node:
    """arange of the logical indices that this rank holds."""
    if local.output_shape() == local.call.outputs[0]:
        return call_as_is(local)  # bounds that are no whole numbers decide the dtype, and round
    call = local.call
    start = argument(call, "start") if has_parameter(call, "start") else 0
    step = argument(call, "step") if has_parameter(call, "step") else 1
    (layout,) = local.outputs
    assert layout is not None
    pieces = [
        local.emit(aten.arange.start_step, start + low * step, start + high * step, step, **local.kwargs)
        for low, high in layout.ranges(0, local.coordinate)
    ]
    return pieces[0] if len(pieces) == 1 else local.emit(aten.cat.default, pieces)


def emit_embedding(local: LocalOp) -> fx.Node:
    """embedding: where the vocabulary is sharded, rows of other ranks count as zero."""
    table = local.inputs[0]
    if table.local_shape(local.coordinate)[0] == table.shape[0]:
        return call_as_is(local)
    mine, row = _local_index(local, local_argument(local, "indices"), table, 0)
    found = call_with(local, indices=row)
    return local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, mine, -1), found, 0.0)


def emit_embedding_backward(local: LocalOp) -> fx.Node:
    """embedding_dense_backward: where the vocabulary is sharded, other ranks' gradients are zeroed."""
    (table,) = local.outputs
    assert table is not None
    num_weights = local.output_shape()[0]
    if num_weights == table.shape[0]:
        return call_as_is(local)
    gradient, indices = local_argument(local, "grad_output"), local_argument(local, "indices")
    mine, row = _local_index(local, indices, table, 0)
    padding = argument(local.call, "padding_idx")
    if padding >= 0:
        mine = local.emit(aten.logical_and.default, mine, local.emit(aten.ne.Scalar, indices, padding))
    masked = local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, mine, -1), gradient, 0.0)
    return call_with(local, grad_output=masked, indices=row, num_weights=num_weights, padding_idx=-1)


def _local_index(local: LocalOp, index: fx.Node, layout: Layout, dim: int) -> tuple[fx.Node, fx.Node]:
    """Whether this rank holds logical `index` of `dim`, and at which local index; 0 where it does not."""
    ranges = layout.ranges(dim, local.coordinate)
    if len(ranges) == 1:
        ((low, high),) = ranges
        mine = _both(local, local.emit(aten.ge.Scalar, index, low), local.emit(aten.lt.Scalar, index, high))
        place = local.emit(aten.sub.Tensor, index, low)
    else:
        mine, place = _digits_index(local, index, layout.digits(dim))
    return mine, local.emit(aten.where.ScalarOther, mine, place, 0)


def _digits_index(local: LocalOp, index: fx.Node, digits: Sequence[Digit]) -> tuple[fx.Node, fx.Node]:
    """The same for a dim of several digits: those of mesh axes must be this rank's, the others make the local index."""
    mine: fx.Node | None = None
    place: fx.Node | None = None
    stride = local_stride = 1
    for digit in reversed(digits):
        shifted = local.emit(aten.div.Tensor_mode, index, stride, rounding_mode="floor")
        value = local.emit(aten.remainder.Scalar, shifted, digit.size)
        stride *= digit.size
        if digit.axis is None:
            part = local.emit(aten.mul.Tensor, value, local_stride)
            place = part if place is None else local.emit(aten.add.Tensor, place, part)
            local_stride *= digit.size
        else:
            same = local.emit(aten.eq.Scalar, value, local.coordinate[digit.axis])
            mine = same if mine is None else _both(local, mine, same)
    assert mine is not None and place is not None
    return mine, place


def _both(local: LocalOp, first: fx.Node, second: fx.Node) -> fx.Node:
    return local.emit(aten.logical_and.default, first, second)


def emit_dense(*names: str) -> Callable[[LocalOp], fx.Node]:
    """An op that takes the tensor arguments of these names without gaps, which slices may have."""

    def emit(local: LocalOp) -> fx.Node:
        return call_with(local, **{name: in_logical_order(local, name) for name in names})

    return emit
