"""Parts of a tensor whose sizes are numbers in tensors, such as the tokens of each expert, sorted by experts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.example_values import add_call

SPLITS = ("split", "split_with_sizes", torch.split)
"""They take a tensor, sizes of parts, and a dim."""


def is_in_part(value: Tensor, dim: int, sizes: Sequence[Any], part: int) -> Tensor:
    """Which places along a dim of `value` are in a part, where the parts lie in order.

    Returns:
        booleans, as many as the dim has places.
    """
    places = torch.arange(value.shape[dim], device=value.device)
    start = sum(sizes[:part])
    return torch.logical_and(places >= start, places < start + sizes[part])


def select_parts(split: fx.Node) -> None:
    """Let masks select the parts of a tensor that a call in a graph from Dynamo splits.

    Before: `parts = split(x, [n, m]); rest = parts[1]`
    After:  `rest = x[is_in_part(x, 0, [n, m], 1)]`
    """
    value, sizes, *dims = split.args
    dim = dims[0] if dims else split.kwargs.get("dim", 0)
    assert isinstance(value, fx.Node) and isinstance(dim, int) and isinstance(sizes, list | tuple), f"{split} splits"
    dim %= value.meta["example_value"].dim()
    for part in list(split.users):
        mask = add_call(part, is_in_part, value, dim, tuple(sizes), part.args[1])
        part.target, part.args = operator.getitem, (value, (*[slice(None)] * dim, mask))
    split.graph.erase_node(split)


def are_all_parts(masks: Sequence[fx.Node]) -> bool:
    """Whether masks select all parts of one tensor, in order."""
    if any(mask.target is not is_in_part for mask in masks):
        return False
    (split, *others) = [mask.args[:3] for mask in masks]
    sizes = split[2]
    assert isinstance(sizes, tuple), f"{masks[0]} has sizes"
    return all(each == split for each in others) and [mask.args[3] for mask in masks] == list(range(len(sizes)))
