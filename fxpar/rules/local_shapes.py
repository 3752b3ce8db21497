"""The local form of ops whose arguments are logical shapes: views, slices, splits, factories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.ir import node_meta
from fxpar.ir.strides import dense_strides, inverse, lies_in_order, stride_order
from fxpar.rules.call import argument, dim_argument, local_argument, with_arguments
from fxpar.rules.rule import LocalOp
from fxpar.rules.views import slice_start

aten = torch.ops.aten


def sized_like_result(name: str) -> Callable[[LocalOp], fx.Node]:
    """Emit the op with its parameter `name`, a shape, as the local shape of the result."""

    def emit(local: LocalOp) -> fx.Node:
        return call_with(local, **{name: list(local.output_shape())})

    return emit


def emit_strided(local: LocalOp) -> fx.Node:
    """new_empty_strided of the local shape, in the logical stride order and without gaps."""
    (logical,) = local.call.outputs
    assert logical is not None
    order = stride_order(torch.empty_strided(logical, argument(local.call, "stride"), device="meta"))
    shape = local.output_shape()
    return call_with(local, size=list(shape), stride=list(dense_strides(shape, order)))


def call_with(local: LocalOp, **replaced: Any) -> fx.Node:
    """Emit the op on the local operands with some arguments replaced by name."""
    args, kwargs = with_arguments(local, **replaced)
    return local.emit(local.call.target, *args, **kwargs)


def emit_view(local: LocalOp) -> fx.Node:
    """A view of the local value, which is copied first if its strides do not allow one.

    That copy is row-major. If the logical view is not, a second copy may have to restore its stride order.
    """
    viewed = local.emit(aten.reshape.default, local.args[0], list(local.output_shape()))
    logical = node_meta.tensor(local.call.args[0])
    if logical.is_contiguous():
        return viewed
    (logical_shape,) = local.call.outputs
    assert logical_shape is not None, f"{local.call.target} returns no tensor"
    order = stride_order(logical.reshape(logical_shape))
    if list(order) == sorted(order) or _views_in_order(local, order):
        return viewed
    return _copy_in_order(local, viewed, order)


def _copy_in_order(local: LocalOp, value: fx.Node, order: Sequence[int]) -> fx.Node:
    in_rows = list(order) == sorted(order)
    ordered = value if in_rows else local.emit(aten.permute.default, value, list(order))
    dense = local.emit(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return dense if in_rows else local.emit(aten.permute.default, dense, inverse(order))


def in_logical_order(local: LocalOp, name: str) -> fx.Node:
    """The tensor argument `name` in the stride order of its logical value, copied unless it is known to have it."""
    value: fx.Node = local_argument(local, name)
    order, known = stride_order(node_meta.tensor(argument(local.call, name))), node_meta.known_value(value)
    return value if known is not None and lies_in_order(known, order) else _copy_in_order(local, value, order)


def emit_as_strided(local: LocalOp) -> fx.Node:
    """as_strided, as_strided_scatter: they see the memory of their operand, which must be that of the logical value."""
    return call_with(local, self=in_logical_order(local, "self"))


def _views_in_order(local: LocalOp, order: Sequence[int]) -> bool:
    """Whether the local value is known, and a view of it has that stride order without a copy."""
    known = node_meta.known_value(local.args[0])
    return known is not None and lies_in_order(known.reshape(local.output_shape()), order)


def emit_split(local: LocalOp) -> fx.Node:
    """split into pieces of local length."""
    return call_with(local, split_size=local.output_shape()[dim_argument(local.call)])


def emit_split_with_sizes(local: LocalOp) -> fx.Node:
    """split_with_sizes into pieces of local lengths."""
    dim = dim_argument(local.call)
    return call_with(local, split_sizes=[local.output_shape(i)[dim] for i in range(len(local.call.outputs))])


def emit_slice(local: LocalOp) -> fx.Node:
    """slice: in a sharded dim, start and end become local indices."""
    dim = dim_argument(local.call)
    return call_with(local, **_local_bounds(local, dim, local.call.inputs[0][dim], local.input_shape(0)[dim]))


def emit_slice_backward(local: LocalOp) -> fx.Node:
    """slice_backward into zeros of the local shape."""
    logical, shape = local.call.outputs[0], local.output_shape()
    assert logical is not None
    dim = dim_argument(local.call, rank=len(logical))
    return call_with(local, input_sizes=list(shape), **_local_bounds(local, dim, logical[dim], shape[dim]))


def _local_bounds(local: LocalOp, dim: int, logical_size: int, local_size: int) -> dict[str, int]:
    """The slice's local start and end; nothing to change in a dim that is not sharded. Shards divide both evenly."""
    if local_size == logical_size:
        return {}
    start = slice_start(argument(local.call, "start"), logical_size)
    end = slice(None, argument(local.call, "end")).indices(logical_size)[1]
    return {"start": start * local_size // logical_size, "end": end * local_size // logical_size}
