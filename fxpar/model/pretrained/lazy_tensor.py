"""A tensor without memory, which is computed when, and as far as, it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Box: TypeAlias = tuple[slice, ...]
"""A part of a tensor: in each dim an interval, with both ends given, of step 1."""

Read: TypeAlias = Callable[[Box], Tensor]
"""Computes a part of a tensor."""

aten = torch.ops.aten


class LazyTensor(Tensor):
    """A tensor of which any part can be read, and which has no memory. It is contiguous.

    Ops on lazy tensors return lazy tensors. A part of a concatenation, stack, piece or transpose is computed from no
    more than the same part of the operands; of any other op, from whole operands.

    sources: the names of what it is computed from.
    """

    read: Read
    sources: frozenset[str]

    @staticmethod
    def __new__(cls, like: Tensor, read: Read, sources: frozenset[str]) -> LazyTensor:
        """`like` has its shape and dtype."""
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("cpu"))

    def __init__(self, like: Tensor, read: Read, sources: frozenset[str]) -> None:
        self.read, self.sources = read, sources

    def whole(self) -> Tensor:
        """All of it, contiguous."""
        return self.read(tuple(slice(0, size) for size in self.shape)).contiguous()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the one of plain tensors
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = [each for each in pytree.tree_leaves(args) if isinstance(each, LazyTensor)]
        sources = frozenset[str]().union(*(each.sources for each in lazy))
        described = func(*pytree.tree_map_only(LazyTensor, _on_meta, args), **kwargs)
        results = [described] if isinstance(described, Tensor) else described
        make_reads = _READS.get(func)
        if make_reads is None:
            reads = [_part_of_any_op(number, func, args, kwargs) for number in range(len(results))]
        else:
            reads = make_reads(*args, **kwargs)
        made = [LazyTensor(result, read, sources) for result, read in zip(results, reads, strict=True)]
        return made[0] if isinstance(described, Tensor) else made


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _part_of_any_op(number: int, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Read:
    """A part of the result of that `number`, by the op itself on whole operands."""

    def read(box: Box) -> Tensor:
        found = func(*pytree.tree_map_only(LazyTensor, LazyTensor.whole, args), **kwargs)
        part: Tensor = (found if isinstance(found, Tensor) else found[number])[box]
        return part

    return read


def _same(tensor: LazyTensor, **kwargs: Any) -> list[Read]:
    return [tensor.read]


def _concatenated(tensors: Sequence[LazyTensor], dim: int = 0) -> list[Read]:
    dim %= tensors[0].dim()

    def read(box: Box) -> Tensor:
        parts, offset = [], 0
        for tensor in tensors:
            start, stop = max(box[dim].start - offset, 0), min(box[dim].stop - offset, tensor.shape[dim])
            if start < stop:
                parts.append(tensor.read(_within(box, dim, start, stop)))
            offset += tensor.shape[dim]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return [read]


def _stacked(tensors: Sequence[LazyTensor], dim: int = 0) -> list[Read]:
    dim %= tensors[0].dim() + 1

    def read(box: Box) -> Tensor:
        inner = (*box[:dim], *box[dim + 1 :])
        return torch.stack([tensor.read(inner) for tensor in tensors[box[dim]]], dim)

    return [read]


def _transposed(tensor: LazyTensor, dim0: int, dim1: int) -> list[Read]:
    def read(box: Box) -> Tensor:
        swapped = list(box)
        swapped[dim0], swapped[dim1] = box[dim1], box[dim0]
        return tensor.read(tuple(swapped)).transpose(dim0, dim1)

    return [read]


def _squeezed(tensor: LazyTensor, dim: int) -> list[Read]:
    if tensor.shape[dim] != 1:
        return [tensor.read]
    dim %= tensor.dim()
    return [lambda box: tensor.read((*box[:dim], slice(0, 1), *box[dim:])).squeeze(dim)]


def _split(tensor: LazyTensor, size: int, dim: int = 0) -> list[Read]:
    whole = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, whole - start) for start in range(0, whole, size)], dim)


def _split_with_sizes(tensor: LazyTensor, sizes: Sequence[int], dim: int = 0) -> list[Read]:
    dim %= tensor.dim()

    def read_from(offset: int) -> Read:
        return lambda box: tensor.read(_within(box, dim, offset + box[dim].start, offset + box[dim].stop))

    return [read_from(sum(sizes[:number])) for number in range(len(sizes))]


def _within(box: Box, dim: int, start: int, stop: int) -> Box:
    """`box` with another interval in `dim`."""
    return (*box[:dim], slice(start, stop), *box[dim + 1 :])


_READS: dict[Any, Callable[..., list[Read]]] = {
    aten.cat.default: _concatenated,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.dim: _squeezed,
    aten.stack.default: _stacked,
    aten.transpose.int: _transposed,
}
"""By op, returns how a part of each of its results is computed from parts of its operands."""
