"""Assign rows for all places of a mask to a tensor, or add them, where the mask selects them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.ir.capture import example
from fxpar.passes.selected_rows.indexing import Indexing
from fxpar.passes.selected_rows.rows import Rows, RowWriter


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a node of a graph from Dynamo assigns or adds to places of a tensor: `tensor[index] += alpha * values`."""

    tensor: fx.Node
    index: Any
    values: Any
    adds: bool = False
    alpha: float = 1
    in_place: bool = True


def read_assignment(node: fx.Node) -> Assignment | None:
    """The assignment that `node` makes, if it makes one."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    args = node.args
    in_place = name.endswith("_") or name == "setitem"
    match name.rstrip("_"), args:
        case "setitem", (fx.Node() as tensor, index, values):
            return Assignment(tensor, index, values)
        case "index_put", (fx.Node() as tensor, (_, *_) as index, values, *accumulate):
            adds = bool(node.kwargs.get("accumulate", bool(accumulate) and accumulate[0]))
            return Assignment(tensor, tuple(index), values, adds, in_place=in_place)
        case "index_add" | "index_copy", (fx.Node() as tensor, int(dim), index, values):
            before = [slice(None)] * (dim % example(tensor).dim())
            adds, alpha = name.startswith("index_add"), node.kwargs.get("alpha", 1)
            if isinstance(alpha, int | float):
                return Assignment(tensor, (*before, index), values, adds, alpha, in_place)
    return None


def assigned(writer: RowWriter, tensor: fx.Node, at: Indexing, values: Rows | fx.Node | float) -> fx.Node | None:
    """What `tensor` is after `tensor[index] = values`, as a new value; None if values have no such rows.

    Of several rows for one place the last one counts, as in eager mode on one thread, and it alone has a gradient.
    """
    if not isinstance(values, Rows):
        chosen = _of_tensor(writer, writer.assigned(at.mask, tuple(sorted(at.dims))), tensor, at)
        return writer.call(torch.where, chosen, values, tensor)
    found = _by_place(writer, tensor, at, values)
    if found is None:
        return None
    rows, chosen, extra = found
    if extra:
        rows, chosen = writer.flatten(rows, 0, extra), writer.flatten(chosen, 0, extra)
        later = writer.call("flip", writer.call("cumsum", writer.call("flip", chosen, (0,)), 0), (0,))
        last = writer.call(torch.logical_and, chosen, writer.call(operator.eq, later, 1))
        rows, chosen = _sum(writer, rows, last, 1), writer.call("any", chosen, 0)
    rows = _back(writer, rows, at)
    return writer.call(torch.where, _in_dims(writer, chosen, tensor, at), rows, tensor)


def added(writer: RowWriter, tensor: fx.Node, at: Indexing, values: Rows) -> fx.Node | None:
    """What is to be added to `tensor`, of its shape, for `tensor.index_put_(index, values, accumulate=True)`.

    None if values have no such rows.
    """
    found = _by_place(writer, tensor, at, values)
    return None if found is None else _back(writer, _sum(writer, *found), at)


def _by_place(writer: RowWriter, tensor: fx.Node, at: Indexing, values: Rows) -> tuple[fx.Node, fx.Node, int] | None:
    """The values with a dim for each dim of the mask: first those that the tensor has not, then as in the tensor.

    Returns:
        the values, of which other dims are behind these; where the mask selects; and the number of the first ones.
    """
    missing = example(tensor).dim() - len(at.dims) + 1 - example(values.node).dim()
    if None in at.form or missing < 0 or values.mask is not at.mask or values.dim + missing != at.start:
        return None
    dims = tuple(sorted({*values.dims, *at.dims}))
    values = writer.expanded(values, dims)
    rows = writer.call(operator.getitem, values.node, (*[None] * missing, ...)) if missing else values.node
    rows = writer.call("movedim", rows, at.start, 0) if at.start else rows
    rows = writer.unflatten(rows, 0, [example(at.mask).shape[dim] for dim in dims])
    extra = [dim for dim in dims if dim not in at.dims]
    order = [dims.index(dim) for dim in (*extra, *at.dims)]
    chosen = writer.permute(writer.assigned(at.mask, dims), order)
    return writer.permute(rows, [*order, *range(len(dims), example(rows).dim())]), chosen, len(extra)


def _sum(writer: RowWriter, rows: fx.Node, chosen: fx.Node, extra: int) -> fx.Node:
    """The sum over the first dims of the rows that are chosen, each of which is zero where it is not."""
    after = example(rows).dim() - example(chosen).dim()
    places = writer.call(operator.getitem, chosen, (..., *[None] * after))
    kept = writer.call("where", rows, places, 0)
    return writer.call("sum", kept, tuple(range(extra)), dtype=example(rows).dtype) if extra else kept


def _back(writer: RowWriter, rows: fx.Node, at: Indexing) -> fx.Node:
    """Move the dims of the mask, which are the first ones, to where the tensor has them."""
    count = len(at.dims)
    return writer.permute(rows, _order_with(at.start, count, example(rows).dim()))


def _order_with(start: int, count: int, dims: int) -> Sequence[int]:
    return [*range(count, count + start), *range(count), *range(count + start, dims)]


def _of_tensor(writer: RowWriter, chosen: fx.Node, tensor: fx.Node, at: Indexing) -> fx.Node:
    """What is chosen along the dims of the mask, for the dims of the tensor."""
    in_order = sorted(at.dims)
    return _in_dims(writer, writer.permute(chosen, [in_order.index(dim) for dim in at.dims]), tensor, at)


def _in_dims(writer: RowWriter, chosen: fx.Node, tensor: fx.Node, at: Indexing) -> fx.Node:
    after = example(tensor).dim() - at.start - len(at.dims)
    return writer.call(operator.getitem, chosen, (*[None] * at.start, ..., *[None] * after))
