"""Rows for all places of a mask, in the place of those that it selects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpar.ir.capture import example
from fxpar.ir.example_values import add_call
from fxpar.passes.selected_rows.indexing import Indexing

_FILLER = 0.5
"""What rows have that a mask leaves out: in the domain of most functions, so that no gradient is NaN."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the places of a mask, whether it selects them or not.

    node: the tensor that has them.
    mask: the first node that has the value of the mask.
    dims: the dims of the mask along which there is a row for each place, in order. Along others all rows are equal, and
        there is one for all.
    dim: the dim of the tensor along which they lie.
    """

    node: fx.Node
    mask: fx.Node
    dims: tuple[int, ...]
    dim: int = 0


class RowWriter:
    """Writes calls that make rows of tensors, in front of the node `before`.

    condition_beside: gives a boolean tensor without dims that is true where what is written is to have an effect; None
        if that is wherever the given mask selects something.
    """

    def __init__(self) -> None:
        self.before: fx.Node
        self.condition_beside: Callable[[fx.Node], fx.Node | None] = lambda mask: None
        self._chosen: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        self._keep: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function or a method."""
        return add_call(self.before, target, *args, **kwargs)

    def chosen(self, mask: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """Whether the mask selects a place, for the places along these dims of it; booleans of the sizes of `dims`."""
        if (mask, dims) not in self._chosen:
            found = mask if example(mask).dtype == torch.bool else self.call(operator.ne, mask, 0)
            for dim in reversed(range(example(mask).dim())):
                if dim not in dims:
                    found = self.call("any", found, dim)
            self._chosen[mask, dims] = found
        return self._chosen[mask, dims]

    def assigned(self, mask: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """`chosen`, where the condition holds."""
        chosen, condition = self.chosen(mask, dims), self.condition_beside(mask)
        return chosen if condition is None else self.call(torch.logical_and, chosen, condition)

    def keep(self, mask: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """`chosen` as a vector, which says which rows are kept."""
        if (mask, dims) not in self._keep:
            self._keep[mask, dims] = self.flatten(self.chosen(mask, dims), 0, len(dims))
        return self._keep[mask, dims]

    def select(self, source: fx.Node, by: Indexing) -> Rows:
        """Rows of `source` for all places, with a filler where the mask selects none."""
        dims = tuple(sorted(by.dims))
        indexed = [by.start + by.dims.index(dim) for dim in dims]
        others = [dim for dim in range(example(source).dim()) if dim not in indexed]
        rows = Rows(self.flatten(self.permute(source, [*indexed, *others]), 0, len(dims)), by.mask, dims)
        dtype = example(source).dtype
        kept = self.masked(rows, _FILLER if dtype.is_floating_point else dtype == torch.bool)
        if by.start:
            kept = self.call("movedim", kept, 0, by.start)
        if None in by.form:
            kept = self.call(operator.getitem, kept, by.form)
        return replace(rows, node=kept, dim=by.before)

    def masked(self, rows: Rows, other: float) -> fx.Node:
        """The rows, with `other` in the place of those that are not kept."""
        value = example(rows.node)
        filler = bool(other) if value.dtype == torch.bool else other if value.is_floating_point() else int(other)
        return self.call("where", rows.node, self.places(rows), filler)

    def places(self, rows: Rows) -> fx.Node:
        """Which rows are kept, of as many dims as the tensor that has them."""
        after = example(rows.node).dim() - rows.dim - 1
        keep = self.keep(rows.mask, rows.dims)
        return self.call(operator.getitem, keep, (*[None] * rows.dim, slice(None), *[None] * after))

    def expanded(self, rows: Rows, dims: tuple[int, ...]) -> Rows:
        """A row for each place along more dims of the mask."""
        if rows.dims == dims:
            return rows
        sizes = example(rows.mask).shape
        value = self.unflatten(rows.node, rows.dim, [sizes[dim] for dim in rows.dims])
        for place, dim in enumerate(dims):
            if dim not in rows.dims:
                value = self.call("unsqueeze", value, rows.dim + place)
        after = example(rows.node).dim() - rows.dim - 1
        value = self.call("expand", value, *[-1] * rows.dim, *(sizes[dim] for dim in dims), *[-1] * after)
        return replace(rows, node=self.flatten(value, rows.dim, len(dims)), dims=dims)

    def flatten(self, value: fx.Node, start: int, count: int) -> fx.Node:
        """`count` dims, from `start` on, as one."""
        return value if count == 1 else self.call("flatten", value, start, start + count - 1)

    def unflatten(self, value: fx.Node, dim: int, sizes: Sequence[int]) -> fx.Node:
        """A dim as several."""
        return value if len(sizes) == 1 else self.call("unflatten", value, dim, tuple(sizes))

    def permute(self, value: fx.Node, order: Sequence[int]) -> fx.Node:
        """The dims in this order."""
        return value if list(order) == sorted(order) else self.call("permute", value, *order)
