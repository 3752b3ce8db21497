"""Notation of the ops that only move values: views, slices, splits and concatenations.

They are where shards that start inside a dim come from: `Shard(dim, parts, outer)` of a dim that is flattened
after dims of A values becomes a shard of the long dim with A * outer leading values; splitting divides by A again.
"""

from __future__ import annotations

from functools import lru_cache
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
    assert shape is not None, f"{call.target} gives no tensor"
    return shape


@lru_cache(maxsize=4096)
def _reshaped(source: Shape, result: Shape) -> Einsum | None:
    """Dims are cut into the smallest groups of equal length; the dims of a group share a letter."""
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
    """t: a matrix is transposed, less than a matrix stays."""
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
    """repeat: the operand's dim comes after as many leading values as it is repeated."""
    repeats = argument(call, "repeats")
    if 0 in repeats:
        return None
    added = len(repeats) - len(call.inputs[0])
    dims = free_dims(len(call.inputs[0]))
    source = tuple(d and Dim(d.letter, times) for d, times in zip(dims, repeats[added:], strict=True))
    return Einsum((source,), ((*[None] * added, *dims),))


def selected(call: OpCall) -> Einsum:
    """select: the dim that is indexed goes."""
    return Einsum(*_without(len(call.inputs[0]), dim_argument(call)))


def select_restored(call: OpCall) -> Einsum:
    """select_backward: the dim that was indexed comes back."""
    rank = len(_result(call))
    whole, rest = _without(rank, dim_argument(call, rank=rank))
    return Einsum(rest, whole)


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
    """slice: one of several pieces of equal length, or some other part of a dim that then is whole."""
    whole, piece = _whole_and_piece(call, call.inputs[0], _result(call))
    return Einsum((whole,), (piece,))


def slice_restored(call: OpCall) -> Einsum:
    """slice_backward: a piece is put back among zeros."""
    whole, piece = _whole_and_piece(call, _result(call), call.inputs[0])
    return Einsum((piece,), (whole,))


def _whole_and_piece(call: OpCall, whole: Shape, piece: Shape) -> tuple[Dims, Dims]:
    dim = dim_argument(call, rank=len(whole))
    start = slice_start(argument(call, "start"), whole[dim])
    length = piece[dim]
    contiguous = argument(call, "step") == 1 and length > 0
    if contiguous and whole[dim] % length == 0 and start % length == 0:
        return _cut(len(whole), dim, whole[dim] // length)
    return _cut(len(whole), dim, None)


def slice_start(start: int | None, size: int) -> int:
    """Where a slice starts in a dim of `size`, as Python counts."""
    return slice(start, None).indices(size)[0]


def split(call: OpCall) -> Einsum:
    """split, split_with_sizes: into pieces of equal length, or else of a whole dim."""
    dim = dim_argument(call)
    whole, piece = _cut(len(call.inputs[0]), dim, _equal_pieces(call.outputs, dim))
    return Einsum((whole,), (piece,) * len(call.outputs))


def concatenated(call: OpCall) -> Einsum | None:
    """cat: of pieces of equal length, or else along a whole dim."""
    rank = len(_result(call))
    if any(len(shape) != rank for shape in call.inputs):
        return None  # cat skips tensors of shape (0,) whatever the rank of the others
    dim = dim_argument(call, rank=rank)
    whole, piece = _cut(rank, dim, _equal_pieces(call.inputs, dim))
    return Einsum((piece,) * len(call.inputs), (whole,))


def _equal_pieces(shapes: tuple[Shape | None, ...], dim: int) -> int | None:
    """How many pieces there are, if they have one length."""
    lengths = {shape[dim] for shape in shapes if shape is not None}
    return len(shapes) if len(lengths) == 1 else None


@lru_cache(maxsize=4096)
def _cut(rank: int, dim: int, pieces: int | None) -> tuple[Dims, Dims]:
    """The dims of a tensor, and of each of the `pieces` into which `dim` is cut; whole if they are unequal."""
    whole = free_dims(rank)
    piece = list(whole)
    cut = whole[dim]
    assert cut is not None
    if pieces is None:
        whole[dim] = piece[dim] = None
    else:
        piece[dim] = Dim(cut.letter, pieces)
    return tuple(whole), tuple(piece)


def padded(call: OpCall) -> Einsum:
    """constant_pad_nd: dims that are padded are whole."""
    dims = free_dims(len(call.inputs[0]))
    pad = argument(call, "pad")  # (before, after) of the last dim, then of the one before it, ...
    for place in range(len(pad) // 2):
        if pad[2 * place] or pad[2 * place + 1]:
            dims[-1 - place] = None
    return Einsum((tuple(dims),), (tuple(dims),))


def factory(call: OpCall) -> Einsum:
    """full, zeros, new_ones, ...: any dim of the result; operands give no more than a dtype and a device."""
    return Einsum(tuple(None for _ in call.inputs), (tuple(free_dims(len(_result(call)))),))
