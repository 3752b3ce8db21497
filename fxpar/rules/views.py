"""Notation of the ops that only copy values: views, slices, splits and concatenations.

They make shards that start inside a dim: `Shard(dim, parts, outer)` of a dim that is flattened after dims of A values
becomes a shard of the long dim with A * outer leading values; splitting divides by A again.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import TypeAlias

from fxpar.rules.call import argument, dim_argument
from fxpar.rules.einsum import Dim, Einsum, free_dims
from fxpar.rules.rule import OpCall, Shape

Dims: TypeAlias = tuple[Dim | None, ...]


def reshaped(call: OpCall) -> Einsum | None:
    """view, reshape, squeeze, unsqueeze: dims are flattened and split."""
    return _reshaped(call.inputs[0], _result(call))


def _result(call: OpCall) -> Shape:
    (shape,) = call.outputs
    assert shape is not None, f"{call.target} returns no tensor"
    return shape


@lru_cache(maxsize=4096)
def _reshaped(source: Shape, result: Shape) -> Einsum | None:
    """Dims of both shapes are matched in the smallest groups of equal size; the dims of a group share a letter."""
    if 0 in source:
        return None
    inputs: list[Dim | None] = [None] * len(source)
    outputs: list[Dim | None] = [None] * len(result)
    left = [(dim, size) for dim, size in enumerate(source) if size > 1]
    right = [(dim, size) for dim, size in enumerate(result) if size > 1]
    for group in map(str, range(len(left))):
        if not left:
            break
        from_left = from_right = 1
        while from_left == 1 or from_left != from_right:
            if from_left <= from_right:
                dim, size = left.pop(0)
                inputs[dim], from_left = Dim(group, from_left), from_left * size
            else:
                dim, size = right.pop(0)
                outputs[dim], from_right = Dim(group, from_right), from_right * size
    return Einsum((tuple(inputs),), (tuple(outputs),))


def permuted(call: OpCall) -> Einsum:
    """permute."""
    rank = len(call.inputs[0])
    return _reordered([dim % rank for dim in argument(call, "dims")])


def transposed(call: OpCall) -> Einsum:
    """transpose of two dims."""
    order = list(range(len(call.inputs[0])))
    first, second = dim_argument(call, "dim0"), dim_argument(call, "dim1")
    if order:
        order[first], order[second] = order[second], order[first]
    return _reordered(order)


def matrix_transposed(call: OpCall) -> Einsum:
    """t: a matrix is transposed, a vector or scalar is returned as it is."""
    return _reordered(list(reversed(range(len(call.inputs[0])))))


def _reordered(order: list[int]) -> Einsum:
    dims = free_dims(len(order))
    return Einsum((tuple(dims),), (tuple(dims[dim] for dim in order),))


def expanded(call: OpCall) -> Einsum:
    """expand: a dim that is broadcast may be sharded in the result while the operand is replicated."""
    source, result = call.inputs[0], _result(call)
    dims = free_dims(len(result))
    added = len(result) - len(source)
    kept = [dims[added + dim] if size == result[added + dim] else None for dim, size in enumerate(source)]
    return Einsum((tuple(kept),), (tuple(dims),))


def repeated(call: OpCall) -> Einsum | None:
    """repeat: the operand's dim has as many leading values as it is repeated times."""
    repeats = argument(call, "repeats")
    if 0 in repeats:
        return None
    added = len(repeats) - len(call.inputs[0])
    dims = free_dims(len(call.inputs[0]))
    source = tuple(d and Dim(d.letter, times) for d, times in zip(dims, repeats[added:], strict=True))
    return Einsum((source,), ((*[None] * added, *dims),))


def selected(call: OpCall) -> Einsum:
    """select: the indexed dim is removed."""
    return Einsum(*_without(len(call.inputs[0]), dim_argument(call)))


def select_restored(call: OpCall) -> Einsum:
    """select_backward: the indexed dim is restored."""
    rank = len(_result(call))
    whole, rest = _without(rank, dim_argument(call, rank=rank))
    return Einsum(rest, whole)


def diagonal(call: OpCall) -> Einsum:
    """diagonal: two dims, which are whole, become one at the end."""
    return Einsum(*_diagonal(call, len(call.inputs[0])))


def diagonal_restored(call: OpCall) -> Einsum:
    """diagonal_backward: a diagonal is put back among zeros."""
    whole, line = _diagonal(call, len(_result(call)))
    return Einsum(line, whole)


def _diagonal(call: OpCall, rank: int) -> tuple[tuple[Dims], tuple[Dims]]:
    gone = {dim_argument(call, name, rank) for name in ("dim1", "dim2")}
    dims = free_dims(rank)
    rest = (dim for position, dim in enumerate(dims) if position not in gone)
    return (tuple(None if position in gone else dim for position, dim in enumerate(dims)),), ((*rest, None),)


def unfolded(call: OpCall) -> Einsum | None:
    """unfold: windows of a dim, which is whole, in a new last dim."""
    if not call.inputs[0]:
        return None
    dims = _uncut(len(call.inputs[0]), dim_argument(call, "dimension"))
    return Einsum((dims,), ((*dims, None),))


def folded(call: OpCall) -> Einsum:
    """unfold_backward: windows are added where they were taken from."""
    rank = len(_result(call))
    dims = _uncut(rank, dim_argument(call, rank=rank))
    return Einsum(((*dims, None),), (dims,))


def selection_replaced(call: OpCall) -> Einsum:
    """select_scatter: one value of a dim, which is whole, is replaced."""
    whole, (rest,) = _without(len(call.inputs[0]), dim_argument(call))
    return Einsum((*whole, rest), whole)


def slice_replaced(call: OpCall) -> Einsum:
    """slice_scatter: a piece of a dim, which is whole, is replaced."""
    rank = len(call.inputs[0])
    dims = _uncut(rank, dim_argument(call))
    return Einsum((dims, dims), (dims,))


def unbound(call: OpCall) -> Einsum:
    """unbind: one result per value of a dim."""
    whole, (piece,) = _without(len(call.inputs[0]), dim_argument(call))
    return Einsum(whole, (piece,) * len(call.outputs))


def stacked(call: OpCall) -> Einsum:
    """stack: one value of a new dim per operand."""
    rank = len(_result(call))
    whole, (piece,) = _without(rank, dim_argument(call, rank=rank))
    return Einsum((piece,) * len(call.inputs), whole)


def _without(rank: int, removed: int) -> tuple[tuple[Dims], tuple[Dims]]:
    """`rank` dims of which `removed` is whole, and the same without it."""
    dims = free_dims(rank)
    rest = dims[:removed] + dims[removed + 1 :]
    dims[removed] = None
    return (tuple(dims),), (tuple(rest),)


def sliced(call: OpCall) -> Einsum:
    """slice: the dim is sharded within blocks, each of which the slice contains as a whole or not at all."""
    whole, piece = _whole_and_piece(call, call.inputs[0], _result(call))
    return Einsum((whole,), (piece,))


def slice_restored(call: OpCall) -> Einsum:
    """slice_backward: a piece is put back among zeros."""
    whole, piece = _whole_and_piece(call, _result(call), call.inputs[0])
    return Einsum((piece,), (whole,))


def _whole_and_piece(call: OpCall, whole: Shape, piece: Shape) -> tuple[Dims, Dims]:
    dim = dim_argument(call, rank=len(whole))
    start, length = slice_start(argument(call, "start"), whole[dim]), piece[dim]
    if argument(call, "step") != 1 or length == 0:
        return _uncut(len(whole), dim), _uncut(len(whole), dim)
    blocks = whole[dim] // gcd(whole[dim], start, length)
    cut, (part,) = _cut(len(whole), dim, blocks, (Fraction(whole[dim], length),))
    return cut, part


def slice_start(start: int | None, size: int) -> int:
    """Where a slice starts in a dim of `size`, as Python counts."""
    return slice(start, None).indices(size)[0]


def split(call: OpCall) -> Einsum:
    """split, split_with_sizes: a dim is sharded within blocks, of which every piece has a whole number."""
    whole, pieces = _whole_and_pieces(call.outputs, dim_argument(call))
    return Einsum((whole,), pieces)


def concatenated(call: OpCall) -> Einsum | None:
    """cat: a dim is sharded within blocks, of which operands have whole numbers. Those of shape (0,) are skipped."""
    rank = len(_result(call))
    joined = [shape for shape in call.inputs if shape != (0,)]
    if not joined:
        return None
    whole, pieces = _whole_and_pieces(tuple(joined), dim_argument(call, rank=rank))
    remaining = iter(pieces)
    return Einsum(tuple((None,) if shape == (0,) else next(remaining) for shape in call.inputs), (whole,))


def _whole_and_pieces(shapes: tuple[Shape | None, ...], dim: int) -> tuple[Dims, tuple[Dims, ...]]:
    """The dims of pieces along `dim`, and of all of them together."""
    lengths = [shape[dim] for shape in shapes if shape is not None]
    rank = max(len(shape) for shape in shapes if shape is not None)
    if 0 in lengths:
        return _uncut(rank, dim), (_uncut(rank, dim),) * len(lengths)
    return _cut(rank, dim, 1, tuple(Fraction(sum(lengths), length) for length in lengths))


def _uncut(rank: int, dim: int) -> Dims:
    """The dims of a tensor whose `dim` is whole."""
    dims = free_dims(rank)
    dims[dim] = None
    return tuple(dims)


@lru_cache(maxsize=4096)
def _cut(rank: int, dim: int, blocks: int, shares: tuple[Fraction, ...]) -> tuple[Dims, tuple[Dims, ...]]:
    """The dims of a tensor and of pieces of `dim`, whose `leading` are the `shares`; see `Dim`."""
    dims = free_dims(rank)
    cut = dims[dim]
    assert cut is not None
    before, after = tuple(dims[:dim]), tuple(dims[dim + 1 :])
    whole = (*before, Dim(cut.letter, blocks=blocks), *after)
    return whole, tuple((*before, Dim(cut.letter, leading=share), *after) for share in shares)


def padded(call: OpCall) -> Einsum:
    """constant_pad_nd: dims that are padded are whole."""
    dims = free_dims(len(call.inputs[0]))
    pad = argument(call, "pad")  # (before, after) of the last dim, then of the one before it, ...
    for place in range(len(pad) // 2):
        if pad[2 * place] or pad[2 * place + 1]:
            dims[-1 - place] = None
    return Einsum((tuple(dims),), (tuple(dims),))


def factory(call: OpCall) -> Einsum:
    """full, zeros, new_ones, ...: any dim of the result; operands only determine the dtype and the device."""
    return Einsum(tuple(None for _ in call.inputs), (tuple(free_dims(len(_result(call)))),))
