"""Map the dims of a rearranged value to those of its source: each dim as digits of the source's dims.

An index along a dim is a mixed-radix number, most significant digit first. A digit of a rearranged value is a part of a
dim of its source: with the source's dims `[B, T]`, the value `view([B, 2, T / 2]).permute([1, 0, 2])` has the dims
`[(T, high half)]`, `[B]` and `[(T, low half)]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from fxpar.ir.node_meta import known_value, tensor
from fxpar.rules.call import argument, op_call

aten = torch.ops.aten


class SourceDigit(NamedTuple):
    """`size` indices along dim `dim` of the source, `step` apart."""

    dim: int
    step: int
    size: int


Dims: TypeAlias = tuple[tuple[SourceDigit, ...], ...]
"""For every dim of a value its digits, most significant first; those of size 1 are left out."""


def whole(shape: Sequence[int]) -> Dims:
    """The dims of a source of `shape`."""
    return tuple((SourceDigit(dim, 1, size),) if size != 1 else () for dim, size in enumerate(shape))


def sizes(dims: Dims) -> list[int]:
    """The shape of a value of `dims`."""
    return [math.prod(digit.size for digit in digits) for digits in dims]


def regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The dims after a view in `shape`; None where that divides a digit unevenly."""
    left = [digit for digits in dims for digit in digits][::-1]
    result = []
    for size in shape:
        taken: list[SourceDigit] = []
        while size > 1:
            if not left:
                return None
            digit = left.pop()
            if digit.size > size:
                if digit.size % size:
                    return None
                low = digit.size // size
                left.append(SourceDigit(digit.dim, digit.step, low))
                digit = SourceDigit(digit.dim, digit.step * low, size)
            if size % digit.size:
                return None
            taken.append(digit)
            size //= digit.size
        result.append(joined(taken))
    return None if left else tuple(result)


def joined(digits: Iterable[SourceDigit]) -> tuple[SourceDigit, ...]:
    """`digits`, with neighbours merged that are contiguous in the source."""
    found: list[SourceDigit] = []
    for digit in digits:
        if found and found[-1].dim == digit.dim and found[-1].step == digit.step * digit.size:
            digit = SourceDigit(digit.dim, digit.step, found.pop().size * digit.size)
        found.append(digit)
    return tuple(found)


_REGROUPING = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
}
"""Ops that keep the order of elements if they keep their number."""

_TRANSPOSING = {aten.permute.default, aten.transpose.int, aten.t.default}


def rearranges(node: fx.Node) -> bool:
    """Whether `node` returns exactly the elements of its one operand, each once, in any order."""
    if node.target in _TRANSPOSING:
        return True
    if node.target not in _REGROUPING:
        return False
    found, operand = known_value(node), known_value(node.all_input_nodes[0])
    return isinstance(found, Tensor) and isinstance(operand, Tensor) and found.numel() == operand.numel()


def through(node: fx.Node, dims: Dims) -> Dims | None:
    """The dims of the result of a rearranging `node` on an operand of `dims`; None if it divides a digit unevenly."""
    if node.target is aten.t.default:
        return dims[::-1]
    if node.target is aten.permute.default:
        return tuple(dims[dim] for dim in argument(op_call(node), "dims"))
    if node.target is aten.transpose.int:
        order, call = list(range(len(dims))), op_call(node)
        first, second = argument(call, "dim0"), argument(call, "dim1")
        order[first], order[second] = order[second], order[first]
        return tuple(dims[dim] for dim in order)
    return regrouped(dims, tensor(node).shape)


def origin(node: fx.Node) -> tuple[fx.Node, Dims]:
    """The first value that `node` is a rearrangement of, and the dims of `node` in digits of that value."""
    path = [node]
    while rearranges(path[-1]):
        path.append(path[-1].all_input_nodes[0])
    for start in reversed(path):  # the first one unless a digit is divided unevenly
        dims: Dims | None = whole(tensor(start).shape)
        for step in reversed(path[: path.index(start)]):
            dims = dims and through(step, dims)
        if dims is not None:
            return start, dims
    raise AssertionError(f"{node} is no rearrangement of itself")


def composed(outer: Dims, inner: Dims) -> Dims | None:
    """`outer`, in digits of a value that has the dims `inner`, converted to digits of that value's source."""
    result = []
    for digits in outer:
        found: list[SourceDigit] = []
        for digit in digits:
            stretch = _stretch(inner[digit.dim], digit)
            if stretch is None:
                return None
            found += stretch
        result.append(joined(found))
    return tuple(result)


def _stretch(digits: Sequence[SourceDigit], wanted: SourceDigit) -> list[SourceDigit] | None:
    """The digits of the part `wanted` of a dim that has `digits`."""
    size = math.prod(digit.size for digit in digits)
    parts = regrouped((tuple(digits),), [size // wanted.step // wanted.size, wanted.size, wanted.step])
    return None if parts is None else list(parts[1])


def refined(first: Dims, second: Dims) -> tuple[Dims, Dims] | None:
    """Both, with digits divided so that they have the same ones; None where that is not possible."""
    cuts: dict[int, set[int]] = {}
    for digits in (*first, *second):
        for digit in digits:
            cuts.setdefault(digit.dim, set()).update((digit.step, digit.step * digit.size))
    one, other = ([_cut(digits, cuts) for digits in dims] for dims in (first, second))
    fitting = tuple(tuple(digits for digits in dims if digits is not None) for dims in (one, other))
    return (fitting[0], fitting[1]) if [*map(len, fitting)] == [len(one), len(other)] else None


def _cut(digits: Sequence[SourceDigit], cuts: dict[int, set[int]]) -> tuple[SourceDigit, ...] | None:
    result: list[SourceDigit] = []
    for digit in digits:
        end = digit.step * digit.size
        for cut in sorted((cut for cut in cuts[digit.dim] if digit.step <= cut < end), reverse=True):
            if end % cut or cut % digit.step:
                return None
            result.append(SourceDigit(digit.dim, cut, end // cut))
            end = cut
    return tuple(result)
