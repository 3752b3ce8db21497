"""Cut a whole tensor into the pieces of a layout, and put pieces together again, in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.ir.layout import Layout, Partial


def shard_of(whole: Tensor, layout: Layout, coordinate: Mapping[str, int]) -> Tensor:
    """The piece of `whole` (shape `layout.shape`) that the rank at `coordinate` holds; a view where one exists."""
    piece = whole
    for dim in range(whole.dim()):
        piece = _shard_dim(piece, layout, dim, coordinate)
    return piece


def _shard_dim(piece: Tensor, layout: Layout, dim: int, coordinate: Mapping[str, int]) -> Tensor:
    if layout.is_ragged(dim):
        ((start, stop),) = layout.ranges(dim, coordinate)
        return piece.narrow(dim, start, stop - start)
    digits = layout.digits(dim)
    if all(digit.axis is None for digit in digits):
        return piece
    piece = piece.unflatten(dim, [digit.size for digit in digits])
    for position in reversed(range(len(digits))):
        axis = digits[position].axis
        if axis is not None:
            piece = piece.select(dim + position, coordinate[axis])
    kept = sum(digit.axis is None for digit in digits)
    return piece.unsqueeze(dim) if kept == 0 else piece.flatten(dim, dim + kept - 1)


def assemble(pieces: Iterable[tuple[Mapping[str, int], Tensor]], layout: Layout) -> Tensor:
    """The whole tensor from (coordinate, piece) pairs; partial sums are added, partial maxima maximised.

    Every coordinate of the axes that `layout` names must be there exactly once.
    """
    reductions = {p.op for _, p in layout.axes if isinstance(p, Partial)}
    assert len(reductions) <= 1, f"pieces hold different kinds of partial values: {layout}"
    whole: Tensor | None = None
    for coordinate, piece in pieces:
        if whole is None:
            whole = torch.full(
                layout.shape, _least(piece.dtype) if "max" in reductions else 0, dtype=piece.dtype, device=piece.device
            )
        places = logical_indices(layout, coordinate).reshape(-1)
        values = piece.reshape(-1)
        if "sum" in reductions:
            values = values + whole.view(-1)[places]
        elif "max" in reductions:
            values = torch.maximum(values, whole.view(-1)[places])
        whole.view(-1)[places] = values
    assert whole is not None, "no pieces to assemble"
    return whole


def _least(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def logical_indices(layout: Layout, coordinate: Mapping[str, int]) -> Tensor:
    """The row-major logical index of every element of the local piece; int64, of the local shape."""
    return shard_of(torch.arange(math.prod(layout.shape), device="cpu").view(layout.shape), layout, coordinate)


@dataclass(frozen=True, slots=True)
class LogicalBox:
    """A local piece as a strided box of logical element numbers: `sizes` in digits, row-major logical `strides`."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def joined(self) -> LogicalBox:
        """The same box in as few dims as possible, at least one: dims that together are evenly spaced are merged."""
        joined: list[tuple[int, int]] = []
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 1:
                continue
            if joined and joined[-1][1] == size * stride:
                joined[-1] = joined[-1][0] * size, stride
            else:
                joined.append((size, stride))
        sizes, strides = zip(*joined or [(1, 1)], strict=True)
        return LogicalBox(sizes, strides, self.offset)


def logical_box(layout: Layout, coordinate: Mapping[str, int]) -> LogicalBox:
    """The positions of the local piece's elements in the row-major logical tensor: the index of random numbers."""
    sizes: list[int] = []
    strides: list[int] = []
    offset, weight = 0, 1
    for dim in reversed(range(len(layout.shape))):
        if layout.is_ragged(dim):
            ((start, stop),) = layout.ranges(dim, coordinate)
            sizes.append(stop - start)
            strides.append(weight)
            offset += start * weight
        else:
            digit_weight = weight
            for digit in reversed(layout.digits(dim)):
                if digit.axis is None:
                    sizes.append(digit.size)
                    strides.append(digit_weight)
                else:
                    offset += coordinate[digit.axis] * digit_weight
                digit_weight *= digit.size
        weight *= layout.shape[dim]
    return LogicalBox(tuple(reversed(sizes)), tuple(reversed(strides)), offset)
