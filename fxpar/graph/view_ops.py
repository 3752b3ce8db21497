"""Emit rearrangements of a value: views and permutations, and a copy only where no view is possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, fx

from fxpar.graph.dim_map import Dims, SourceDigit, composed, origin, refined, sizes, whole
from fxpar.graph.graph_writer import GraphWriter
from fxpar.ir.node_meta import tensor
from fxpar.ir.strides import is_dense, stride_order

aten = torch.ops.aten


def rearrange(write: GraphWriter, node: fx.Node, have: Dims, want: Dims) -> fx.Node:
    """Rearrange the value `node`, whose dims are `have` in digits of some source, to the dims `want` in such digits.

    Before: `node` of the dims `[(a, b)], [c]`
    After:  `view` of the dims `[a], [b], [c]`, `permute` to `[b], [a], [c]`, `clone`, `view` to `[b], [a, c]`
    """
    parts = refined(have, want)
    assert parts is not None, f"{node} of {have} cannot be seen as {want}"
    runs = _runs(*parts)
    source = [digit for digits in parts[0] for digit in digits if digit in runs]
    target = [[digit for digit in digits if digit in runs] for digits in parts[1]]
    node = _view(write, node, [runs[digit] for digit in source])
    node = write.permute(node, [source.index(digit) for digits in target for digit in digits])
    ends = list(accumulate((len(digits) for digits in target), initial=0))
    groups = [range(start, stop) for start, stop in pairwise(ends)]
    if not all(_is_one_stretch(tensor(node), group) for group in groups):
        node = write.contiguous(node)
    return _view(write, node, sizes(want))


def _runs(source: Dims, target: Dims) -> dict[SourceDigit, int]:
    """Runs of digits that follow each other in a dim of both: the first digit of each, with the size of the run."""
    places = {digit: (dim, place) for dim, digits in enumerate(target) for place, digit in enumerate(digits)}
    runs: dict[SourceDigit, int] = {}
    for digits in source:
        first, before = None, None
        for digit in digits:
            dim, place = places[digit]
            first = first if before == (dim, place - 1) and first is not None else digit
            runs[first] = runs.get(first, 1) * digit.size
            before = dim, place
    return runs


def rearranged_from_origin(write: GraphWriter, node: fx.Node, want: Dims) -> fx.Node:
    """Rearrange `node` to the dims `want`, in its own digits, starting from the value that `node` itself rearranges."""
    base, lies = origin(node)
    of_base = composed(want, lies)
    if of_base is None:
        return rearrange(write, node, whole(tensor(node).shape), want)
    return rearrange(write, base, whole(tensor(base).shape), of_base)


def _view(write: GraphWriter, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """`node` in another shape, which its strides must allow."""
    return node if list(tensor(node).shape) == list(shape) else write.call(aten.view.default, node, list(shape))


def _is_one_stretch(found: Tensor, dims: range) -> bool:
    """Whether a view can merge these dims into one."""
    return all(found.stride(dim) == found.stride(after) * found.shape[after] for dim, after in pairwise(dims))


def as_matrices(write: GraphWriter, node: fx.Node) -> fx.Node:
    """`node`, or a copy that fused ops can take: contiguous, or transposed in its last two dims."""
    found = tensor(node)
    return node if found.is_contiguous() or found.mT.is_contiguous() else write.contiguous(node)


def laid_out_like(write: GraphWriter, node: fx.Node, like: Tensor) -> fx.Node:
    """`node`, or a copy with the stride order of `like`, on which its users rely."""
    return write.in_order(node, stride_order(like)) if is_dense(like) else node
