"""A tensor without memory, of which parts are computed where they are copied to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Box: TypeAlias = tuple[slice, ...]
"""A part of a tensor: in each dim an interval, with both ends given, of step 1."""

CopyPart: TypeAlias = Callable[[Box, Tensor], None]
"""Computes a part of a tensor, and writes it into another tensor, of the part's shape, in the dtype of that."""

aten = torch.ops.aten


class LazyTensor(Tensor):
    """A contiguous tensor that has no memory, and of which any part can be copied to another tensor.

    Ops on lazy tensors return lazy tensors. A part of a concatenation, stack, piece or transpose is copied from the
    same part of the operands, with nothing in between; for a part of any other result, whole operands are computed.

    sources: the names of what it is computed from.
    """

    copy_part: CopyPart
    sources: frozenset[str]

    @staticmethod
    def __new__(cls, like: Tensor, copy_part: CopyPart, sources: frozenset[str]) -> LazyTensor:
        """`like` has its shape and dtype."""
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("cpu"))

    def __init__(self, like: Tensor, copy_part: CopyPart, sources: frozenset[str]) -> None:
        self.copy_part, self.sources = copy_part, sources

    def copy_whole(self, target: Tensor) -> None:
        """Copy all of it to `target`."""
        self.copy_part(tuple(slice(0, size) for size in self.shape), target)

    def whole(self, device: str = "cpu") -> Tensor:
        """All of it; on the meta device nothing is kept, but everything is computed."""
        found = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.copy_whole(found)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the one of plain tensors
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = [each for each in pytree.tree_leaves(args) if isinstance(each, LazyTensor)]
        sources = frozenset[str]().union(*(each.sources for each in lazy))
        described = func(*pytree.tree_map_only(LazyTensor, _on_meta, args), **kwargs)
        results = [described] if isinstance(described, Tensor) else described
        make_copies = _COPIES.get(func)
        if make_copies is None:
            copies = [_part_of_any_op(number, func, args, kwargs) for number in range(len(results))]
        else:
            copies = make_copies(*args, **kwargs)
        made = [LazyTensor(result, copy_part, sources) for result, copy_part in zip(results, copies, strict=True)]
        return made[0] if isinstance(described, Tensor) else made


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _part_of_any_op(number: int, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CopyPart:
    """A part of the result of that `number`, by the op itself on whole operands."""

    def copy_part(box: Box, target: Tensor) -> None:
        found = func(*pytree.tree_map_only(LazyTensor, LazyTensor.whole, args), **kwargs)
        target.copy_((found if isinstance(found, Tensor) else found[number])[box])

    return copy_part


def _same(tensor: LazyTensor, **kwargs: Any) -> list[CopyPart]:
    return [tensor.copy_part]


def _concatenated(tensors: Sequence[LazyTensor], dim: int = 0) -> list[CopyPart]:
    dim %= tensors[0].dim()

    def copy_part(box: Box, target: Tensor) -> None:
        first, last, offset = box[dim].start, box[dim].stop, 0
        for tensor in tensors:
            size = tensor.shape[dim]
            start, stop = max(first - offset, 0), min(last - offset, size)
            if start < stop:
                piece = target.narrow(dim, start + offset - first, stop - start)
                tensor.copy_part(_within(box, dim, start, stop), piece)
            offset += size

    return [copy_part]


def _stacked(tensors: Sequence[LazyTensor], dim: int = 0) -> list[CopyPart]:
    dim %= tensors[0].dim() + 1

    def copy_part(box: Box, target: Tensor) -> None:
        for tensor, piece in zip(tensors[box[dim]], target.unbind(dim), strict=True):
            tensor.copy_part((*box[:dim], *box[dim + 1 :]), piece)

    return [copy_part]


def _transposed(tensor: LazyTensor, dim0: int, dim1: int) -> list[CopyPart]:
    def copy_part(box: Box, target: Tensor) -> None:
        swapped = list(box)
        swapped[dim0], swapped[dim1] = box[dim1], box[dim0]
        tensor.copy_part(tuple(swapped), target.transpose(dim0, dim1))

    return [copy_part]


def _squeezed(tensor: LazyTensor, dim: int) -> list[CopyPart]:
    if tensor.shape[dim] != 1:
        return [tensor.copy_part]
    dim %= tensor.dim()
    return [lambda box, target: tensor.copy_part((*box[:dim], slice(0, 1), *box[dim:]), target.unsqueeze(dim))]


def _split(tensor: LazyTensor, size: int, dim: int = 0) -> list[CopyPart]:
    whole = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, whole - start) for start in range(0, whole, size)], dim)


def _split_with_sizes(tensor: LazyTensor, sizes: Sequence[int], dim: int = 0) -> list[CopyPart]:
    dim %= tensor.dim()

    def copy_from(offset: int) -> CopyPart:
        return lambda box, target: tensor.copy_part(
            _within(box, dim, offset + box[dim].start, offset + box[dim].stop), target
        )

    return [copy_from(sum(sizes[:number])) for number in range(len(sizes))]


def _within(box: Box, dim: int, start: int, stop: int) -> Box:
    """`box` with another interval in `dim`."""
    return (*box[:dim], slice(start, stop), *box[dim + 1 :])


_COPIES: dict[Any, Callable[..., list[CopyPart]]] = {
    aten.cat.default: _concatenated,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.dim: _squeezed,
    aten.stack.default: _stacked,
    aten.transpose.int: _transposed,
}
"""By op, returns how a part of each of its results is copied from parts of its operands."""
