"""What an index expression selects by the indices that a mask has found, or by the mask itself."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.node_meta import known_value


@dataclass(frozen=True, slots=True)
class Index:
    """The indices, along a dim of a mask, of the places that it selects: `torch.where(mask)[dim]`."""

    mask: fx.Node
    dim: int


@dataclass(frozen=True, slots=True)
class Indexing:
    """The index expression of a tensor whose dims from `start` on are indexed by places of a mask.

    dims: the dim of the mask of each of them, in the order of the tensor.
    form: the expression for what is selected, where the rows are one dim in the place of those: None and full slices.
    before: the number of its items in front of the rows.
    """

    mask: fx.Node
    start: int
    dims: tuple[int, ...]
    form: tuple[slice | None, ...]
    before: int


def read_indexing(
    tensor: fx.Node, index: Any, indices: Mapping[fx.Node, tuple[Index, ...]], first: Mapping[fx.Node, fx.Node]
) -> Indexing | None:
    """How `index` selects from `tensor`; None if by something else than one mask, or where no rows are found so.

    Args:
        indices: the nodes that have such indices.
        first: for each node the first one that has the same value.
    """
    shape = _shape(tensor)
    if shape is None:
        return None
    found: list[Index] = []
    front: list[slice | None] = []
    behind: list[slice | None] = []
    items = [
        _indices_of(item, indices, first) if isinstance(item, fx.Node) else item
        for item in (index if isinstance(index, tuple) else (index,))
    ]
    for item in _without_ellipsis(items, len(shape)):
        if item is None or item == slice(None):
            (behind if found else front).append(item)
        elif isinstance(item, tuple) and item and not behind:
            found += item
        else:
            return None
    start, dims = front.count(slice(None)), tuple(each.dim for each in found)
    if len({each.mask for each in found}) != 1 or len({*dims}) < len(dims):
        return None
    sizes = _shape(found[0].mask)
    if sizes is None or shape[start : start + len(dims)] != tuple(sizes[dim] for dim in dims):
        return None
    return Indexing(found[0].mask, start, dims, (*front, slice(None), *behind), len(front))


def taken_indices(
    node: fx.Node, indices: Mapping[fx.Node, tuple[Index, ...]], matrices: Mapping[fx.Node, fx.Node]
) -> tuple[Index, ...]:
    """The indices that `node` takes out of several ones: of a tuple, or of the columns of a matrix.

    Args:
        indices: the nodes that have indices, or tuples of them.
        matrices: for nodes that have them as columns, the mask.
    """
    given, more = (node.args[0], node.args[1:]) if node.args else (None, ())
    if not isinstance(given, fx.Node) or node.kwargs:
        return ()
    if given in indices and node.target is operator.getitem and isinstance(known_value(given), tuple):
        return (indices[given][node.args[1]],)  # type: ignore[index]
    if given not in matrices:
        return ()
    mask = matrices[given]
    dims = len(_shape(mask) or ())
    match node.target, more:
        case operator.getitem, ((slice(start=None, stop=None, step=None), int(column)),):
            return (Index(mask, column % dims),)
        case (("unbind" | torch.unbind), (1 | -1,)):
            return tuple(Index(mask, column) for column in range(dims))
        case (("squeeze" | torch.squeeze), (1 | -1,)) | (
            ("flatten" | "view" | "reshape" | torch.flatten | torch.reshape),
            () | (-1,) | ((-1,),),
        ) if dims == 1:
            return (Index(mask, 0),)
    return ()


def _without_ellipsis(items: list[Any], dims: int) -> list[Any]:
    """The items, of which a tuple stands for several dims, with full slices in the place of an ellipsis."""
    if Ellipsis not in items:
        return items
    taken = sum(len(item) if isinstance(item, tuple) else item is not None for item in items) - 1
    place = items.index(Ellipsis)
    return [*items[:place], *[slice(None)] * (dims - taken), *items[place + 1 :]]


def _indices_of(
    item: fx.Node, indices: Mapping[fx.Node, tuple[Index, ...]], first: Mapping[fx.Node, fx.Node]
) -> tuple[Index, ...]:
    value = known_value(item)
    if item not in indices and isinstance(value, Tensor) and value.dtype == torch.bool:
        return tuple(Index(first.get(item, item), dim) for dim in range(value.dim()))
    return indices.get(item, ())


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """The sizes of a tensor, if they are known."""
    value = known_value(node)
    known = isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)
    return tuple(value.shape) if known else None
