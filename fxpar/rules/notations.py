"""Notation that depends on the call: on numbers of dims, on the argument `dim`, on what is broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import fx

from fxpar.ir import node_meta
from fxpar.rules.call import argument, dim_argument, has_parameter
from fxpar.rules.einsum import Dim, Einsum, Pattern, free_dims
from fxpar.rules.rule import OpCall, Shape


def pointwise(call: OpCall) -> Einsum | None:
    """Every result has the shape to which the operands broadcast."""
    return _pointwise(call.inputs, call.outputs)


@lru_cache(maxsize=4096)
def _pointwise(inputs: tuple[Shape, ...], outputs: tuple[Shape | None, ...]) -> Einsum | None:
    shape = outputs[0]
    if shape is None or any(other != shape for other in outputs):
        return None
    dims = free_dims(len(shape))
    return Einsum(tuple(_aligned(operand, shape, dims) for operand in inputs), (tuple(dims),) * len(outputs))


def _aligned(operand: Shape, shape: Shape, dims: list[Dim | None]) -> tuple[Dim | None, ...]:
    """The dims of an operand that is broadcast to `shape`."""
    added = len(shape) - len(operand)
    own = zip(operand, shape[added:], dims[added:], strict=True)
    return tuple(dim if size == whole else None for size, whole, dim in own)


def along_dim(call: OpCall) -> Einsum:
    """An op along `dim` that needs it whole: softmax, cumsum, sort, ..."""
    dims = free_dims(len(call.inputs[0]))
    if dims:
        dims[dim_argument(call)] = None
    return Einsum((tuple(dims),) * len(call.inputs), (tuple(dims),) * len(call.outputs))


def contained(call: OpCall) -> Einsum:
    """isin: each element is looked for among all those of the second operand."""
    dims = tuple(free_dims(len(call.inputs[0])))
    return Einsum((dims, (None,) * len(call.inputs[1])), (dims,))


def of_matrices(call: OpCall) -> Einsum:
    """An op of linear algebra: the last two dims of its first operand are matrices, which are whole."""
    outer = call.inputs[0][:-2]
    dims = free_dims(len(outer))

    def pattern(shape: Shape | None) -> Pattern:
        if shape is None or shape[: len(outer)] != outer:
            return None  # a result that was not asked for is empty
        return (*dims, *[None] * (len(shape) - len(outer)))

    return Einsum(tuple(map(pattern, call.inputs)), tuple(map(pattern, call.outputs)))


def along_dims(call: OpCall) -> Einsum:
    """An op along `dims` that needs them whole: flip, roll. Without dims it is along all."""
    return _along(call, argument(call, "dims") or range(len(call.inputs[0])))


def transformed(call: OpCall) -> Einsum:
    """A Fourier transform along `dim`, several ones, which are whole."""
    return _along(call, argument(call, "dim"))


def _along(call: OpCall, whole: Iterable[int]) -> Einsum:
    rank = len(call.inputs[0])
    along = {dim % rank for dim in whole} if rank else set()
    dims = tuple(None if dim in along else d for dim, d in enumerate(free_dims(rank)))
    return Einsum((dims,), (dims,))


def reduced(call: OpCall) -> Einsum:
    """A reduction over `dim` (one, several, or all) that adds up over ranks."""
    return _reduced(call, whole=False)


def reduced_whole(call: OpCall) -> Einsum:
    """A reduction over `dim` (one, several, or all) whose parts do not combine: argmax, var, ..."""
    return _reduced(call, whole=True)


def _reduced(call: OpCall, whole: bool) -> Einsum:
    rank = len(call.inputs[0])
    gone = _reduced_dims(call, rank)
    source = free_dims(rank)
    keeps = any(shape is not None and len(shape) == rank for shape in call.outputs)
    result = tuple(None if dim in gone else d for dim, d in enumerate(source) if keeps or dim not in gone)
    if whole:
        source = [None if dim in gone else d for dim, d in enumerate(source)]
    return Einsum((tuple(source),), (result,) * len(call.outputs))


def _reduced_dims(call: OpCall, rank: int) -> set[int]:
    dims = argument(call, "dim") if has_parameter(call, "dim") else None
    if isinstance(dims, int):
        dims = [dims]
    return {dim % rank for dim in dims} if dims and rank else set(range(rank))


def normalized(template: str) -> Callable[[OpCall], str]:
    """Notation of layer_norm and similar ops: {H} stands for the normalised dims, {1} for those of their statistics."""

    def written(call: OpCall) -> str:
        dims = len(argument(call, "normalized_shape"))
        return template.replace("{H}", " ".join("H" * dims)).replace("{1}", " ".join("1" * dims))

    return written


def of_channels(template: str) -> Callable[[OpCall], str]:
    """Notation of batch norms: {x} stands for the dims of the input, of which only the second, c, may be sharded.

    {s} stands for statistics of the batch, which are empty where running ones are used.
    """

    def written(call: OpCall) -> str:
        trains = argument(call, "training" if has_parameter(call, "training") else "train")
        whole = " ".join("S" * (len(call.inputs[0]) - 2))
        return template.replace("{x}", f"N c {whole}".strip()).replace("{s}", "c" if trains else "_")

    return written


def indexed(call: OpCall) -> Einsum | None:
    """index: an indexed dim is whole, the dims of the indices take its place."""
    (result,) = call.outputs
    if _has_masks(call) or result is None:
        return None  # the result's shape depends on the mask's values
    source, *shapes = call.inputs
    rank = max(map(len, shapes))
    letters = free_dims(len(source) + rank)
    dims, block = letters[: len(source)], letters[len(source) :]
    given, first = _with_block(call, dims, block)
    patterns = [_aligned(shape, result[first : first + rank], block) for shape in shapes]
    return Einsum((tuple(dims), *patterns), (tuple(given),))


def index_put(call: OpCall) -> Einsum | None:
    """index_put: an indexed dim and the indices are whole; values may be broadcast."""
    if _has_masks(call):
        return None
    source, *shapes, values = call.inputs
    rank = max(map(len, shapes))
    dims = free_dims(len(source))
    taken, first = _with_block(call, dims, [None] * rank)
    sizes = [size for dim, size in enumerate(source) if _index_of(call, dim) is None]
    taken_sizes = (*sizes[:first], *[0] * rank, *sizes[first:])  # the sizes of the block do not matter: it is whole
    whole = [(None,) * len(shape) for shape in shapes]
    return Einsum((tuple(dims), *whole, _aligned(values, taken_sizes, taken)), (tuple(dims),))


def _index_of(call: OpCall, dim: int) -> fx.Node | None:
    """The index tensor of `dim`, if there is one."""
    indices = argument(call, "indices")
    found: fx.Node | None = indices[dim] if dim < len(indices) else None
    return found


def _with_block(call: OpCall, dims: list[Dim | None], block: Sequence[Dim | None]) -> tuple[list[Dim | None], int]:
    """The dims of an indexing result, with `block` in the place of the indexed dims, and the position of `block`.

    In `dims`, the indexed dims are set to None: they are whole.
    """
    at = [dim for dim in range(len(dims)) if _index_of(call, dim) is not None]
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    for dim in at:
        dims[dim] = None
    kept = [d for dim, d in enumerate(dims) if dim not in at]
    return [*kept[:first], *block, *kept[first:]], first


def _has_masks(call: OpCall) -> bool:
    return any(_is_mask(index) for index in argument(call, "indices") if index is not None)


def _is_mask(index: fx.Node) -> bool:
    return node_meta.tensor(index).dtype in (torch.bool, torch.uint8)


def index_selected(call: OpCall) -> Einsum | None:
    """index_select: an indexed dim is whole, the index may be sharded."""
    if not call.inputs[0]:
        return None
    dims = free_dims(len(call.inputs[0]) + 1)
    dim, index = dim_argument(call), dims.pop()
    result = [*dims[:dim], index, *dims[dim + 1 :]]
    dims[dim] = None
    return Einsum((tuple(dims), (index,)), (tuple(result),))


def gathered(call: OpCall) -> Einsum | None:
    """gather: whole along `dim`, whose indices may be sharded; other dims must match."""
    source, index = call.inputs
    if not source or len(source) != len(index):
        return None
    dims = free_dims(len(source) + 1)
    along, dim = dims.pop(), dim_argument(call)
    both = [d if a == b else None for d, a, b in zip(dims, source, index, strict=True)]
    from_source, from_index = list(both), list(both)
    from_source[dim], from_index[dim] = None, along
    return Einsum((tuple(from_source), tuple(from_index)), (tuple(from_index),))


def scattered(call: OpCall) -> Einsum | None:
    """scatter, scatter_add: whole along `dim`; other dims must match."""
    if not call.inputs[0] or len(set(map(len, call.inputs))) > 1:
        return None
    dims = free_dims(len(call.inputs[0]))
    same = [d if len(set(sizes)) == 1 else None for d, *sizes in zip(dims, *call.inputs, strict=True)]
    same[dim_argument(call)] = None
    return Einsum((tuple(same),) * len(call.inputs), (tuple(same),))


def index_added(call: OpCall) -> Einsum | None:
    """index_add, index_copy: whole along `dim`, and so is the index; other dims match."""
    target, index, source = call.inputs
    if not target or len(target) != len(source):
        return None
    dims = free_dims(len(target))
    dims[dim_argument(call)] = None
    return Einsum((tuple(dims), (None,) * len(index), tuple(dims)), (tuple(dims),))


def counted_in_bins(call: OpCall) -> Einsum | None:
    """histc between given bounds: counts add up over ranks. Bounds that are equal stand for those of the values."""
    if argument(call, "min") == argument(call, "max"):
        return None
    return Einsum((tuple(free_dims(len(call.inputs[0]))),), ((None,),))


def counted(call: OpCall) -> Einsum | None:
    """arange of whole numbers; fractions would round differently from another start."""
    bounds = [argument(call, name) for name in ("start", "end", "step") if has_parameter(call, name)]
    return Einsum((), ((Dim("a"),),)) if all(isinstance(bound, int) for bound in bounds) else None


def solved_triangular(call: OpCall) -> str | None:
    """linalg_solve_triangular: each column by itself, or each row where the matrix is on the right."""
    matrix, known = call.inputs
    if matrix[:-2] != known[:-2]:
        return None
    return "... N N, ... N k -> ... N k" if argument(call, "left") else "... N N, ... k N -> ... k N"


def grouped_matmul(call: OpCall) -> str | None:
    """_grouped_mm: rows in groups, each multiplied by a matrix of its own; or groups of columns, for their gradient.

    A shard of rows would not hold whole groups, so that their dim is whole, and that of the groups, too.
    """
    match [len(shape) for shape in call.inputs]:
        case [2, 3, 1]:
            return "S k, G k n, G, _ -> S n"
        case [2, 2, 1]:
            return "m S, S n, G, _ -> G m n"
        case _:
            return None


def embedding_backward(call: OpCall) -> str | None:
    """embedding_dense_backward: rows add up, unless each is scaled by how often its index occurs in all."""
    return None if argument(call, "scale_grad_by_freq") else "... d, ... -> v d"
