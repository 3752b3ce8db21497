"""What digits say of a rearranged value is where its elements lie in the source."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensorMode
from fxpar.graph.dim_map import Dims, SourceDigit, composed, origin, rearranges, refined, regrouped, through, whole
from fxpar.graph.graph_writer import WriterInPlace, aten
from fxpar.graph.view_ops import rearrange
from fxpar.ir.node_meta import set_value

Case: TypeAlias = tuple[tuple[int, ...], list[tuple[Any, tuple[Any, ...]]]]
"""A shape, and ops that rearrange a value of it."""


def taken_from(source: Tensor, dims: Dims) -> Tensor:
    """The value whose dims are those digits of `source`, index by index."""
    offsets = torch.zeros((), dtype=torch.long)
    for digits in dims:
        along = torch.zeros(1, dtype=torch.long)
        for dim, step, size in digits:
            along = (along[:, None] + torch.arange(size) * step * source.stride(dim)).flatten()
        offsets = offsets[..., None] + along
    return source.flatten()[offsets]


@st.composite
def rearranged(draw: st.DrawFn) -> Case:
    """A shape, and ops that rearrange a value of it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    found, ops = torch.arange(torch.Size(shape).numel()).view(shape), []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            order = draw(st.permutations(range(found.dim())))
            ops.append((aten.permute.default, (list(order),)))
        else:
            sizes = draw(st.permutations(_factors(found.numel())))
            joined = draw(st.integers(0, len(sizes)))
            new = [*sizes[joined:], torch.Size(sizes[:joined]).numel()]
            ops.append((aten.reshape.default, (new,)))
        target, args = ops[-1]
        found = target(found, *args)
    return shape, ops


def _factors(number: int) -> list[int]:
    """Its prime factors, of numbers that have no others than 2 and 3."""
    found = []
    for prime in (2, 3):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return found


def graph_of(shape: tuple[int, ...], ops: list[tuple[Any, tuple[Any, ...]]]) -> tuple[fx.Node, fx.Node]:
    """The ops as a graph: the input, and the last of them."""
    graph = fx.Graph()
    source = graph.placeholder("source")
    with FakeTensorMode():
        set_value(source, torch.empty(shape, dtype=torch.long))
    node = source
    for target, args in ops:
        node = WriterInPlace(graph, source).call(target, node, *args)
    return source, node


@settings(max_examples=200, deadline=None)
@given(rearranged())
def test_digits_say_where_elements_come_from(case: Case) -> None:
    shape, ops = case
    source, node = graph_of(shape, ops)
    assert node is source or rearranges(node)
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    expected = value
    for target, args in ops:
        expected = target(expected, *args)
    start, dims = origin(node)
    if start is source:
        assert torch.equal(taken_from(value, dims), expected)


@settings(max_examples=200, deadline=None)
@given(rearranged())
def test_what_was_rearranged_is_put_in_order_again(
    case: Case,
) -> None:
    shape, ops = case
    source, have = graph_of(shape, ops)
    start, dims = origin(have)
    want = whole(shape)
    if start is not source or refined(dims, want) is None:
        return
    result = rearrange(WriterInPlace(have.graph, source), have, dims, want)
    have.graph.output(result)
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    assert torch.equal(fx.Interpreter(fx.GraphModule({}, have.graph)).run(value), value)


def test_a_view_that_cuts_through_a_digit_is_told() -> None:
    turned = whole([2, 3])[::-1]
    assert regrouped(turned, [2, 3]) is None
    assert regrouped(turned, [6]) == ((SourceDigit(1, 1, 3), SourceDigit(0, 1, 2)),)
    assert regrouped(whole([6]), [4]) is None


def test_stretches_that_follow_on_each_other_are_one() -> None:
    split = regrouped(whole([12]), [3, 4])
    assert split == ((SourceDigit(0, 4, 3),), (SourceDigit(0, 1, 4),))
    assert split is not None and regrouped(split, [12]) == whole([12])


def test_digits_of_digits_are_digits_of_the_source() -> None:
    turned = whole([4, 6])[::-1]
    rows = ((SourceDigit(0, 3, 2),), (SourceDigit(0, 1, 3), SourceDigit(1, 1, 4)))
    assert composed(rows, turned) == ((SourceDigit(1, 3, 2),), (SourceDigit(1, 1, 3), SourceDigit(0, 1, 4)))
    uneven = regrouped(turned, [24])
    assert uneven is not None and composed(((SourceDigit(0, 3, 8),), (SourceDigit(0, 1, 3),)), uneven) is None


@pytest.mark.parametrize("size", [2, 3])
def test_what_keeps_its_elements_is_a_rearrangement_and_what_drops_some_is_not(size: int) -> None:
    graph = fx.Graph()
    source = graph.placeholder("source")
    with FakeTensorMode():
        set_value(source, torch.empty(2, 5))
    part = WriterInPlace(graph, source).call(aten.slice.Tensor, source, 0, 0, size)
    assert not rearranges(WriterInPlace(graph, source).call(aten.slice.Tensor, source, 1, 0, size))
    assert rearranges(part) and through(part, whole([2, 5])) == whole([2, 5])
