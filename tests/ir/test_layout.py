"""Layouts, and the pieces of a tensor that they describe."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.ir.layout import AXES, Digit, Layout, Partial, Replicate, Shard
from fxpar.ir.tiles import assemble, logical_box, logical_indices, shard_of


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, dict[str, int]]:
    """A random layout over x and y with the axis sizes: even and ragged shards, shards inside dims, two in one dim."""
    sizes = {"y": draw(st.integers(1, 3)), "x": draw(st.integers(1, 3))}
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    layout = Layout(tuple(shape))
    for axis, parts in sizes.items():
        shards = [Shard(dim, parts, outer) for dim, size in enumerate(shape) for outer in range(1, size + 1)]
        shards = [s for s in shards if s.fits(shape[s.dim]) or s.outer == 1]
        layout = _combined(layout, axis, draw(st.sampled_from(shards))) if draw(st.booleans()) else layout
    return layout, sizes


def _combined(layout: Layout, axis: str, shard: Shard) -> Layout:
    try:
        return layout.with_placement(axis, shard)
    except AssertionError:
        return layout


def coordinates(sizes: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(sizes, index, strict=True)) for index in product(*map(range, sizes.values()))]


@given(layouts())
def test_pieces_assemble_to_the_whole(case: tuple[Layout, dict[str, int]]) -> None:
    layout, sizes = case
    whole = torch.randn(layout.shape)
    pieces = [(at, shard_of(whole, layout, at)) for at in coordinates(sizes)]
    assert all(tuple(piece.shape) == layout.local_shape(at) for at, piece in pieces)
    torch.testing.assert_close(assemble(pieces, layout), whole, rtol=0, atol=0)


@given(layouts())
def test_ranges_are_the_indices_of_the_piece_in_local_order(case: tuple[Layout, dict[str, int]]) -> None:
    layout, sizes = case
    whole = torch.arange(math.prod(layout.shape)).view(layout.shape)
    for at in coordinates(sizes):
        piece = whole
        for dim in range(whole.dim()):
            indices = [index for interval in layout.ranges(dim, at) for index in range(*interval)]
            piece = piece.index_select(dim, torch.tensor(indices, dtype=torch.int64))
        assert torch.equal(piece, shard_of(whole, layout, at))


@given(layouts())
def test_logical_box_numbers_the_elements_as_the_whole_tensor_does(case: tuple[Layout, dict[str, int]]) -> None:
    layout, sizes = case
    for at in coordinates(sizes):
        box = logical_box(layout, at)
        grids = torch.meshgrid(*(torch.arange(size) for size in box.sizes), indexing="ij") if box.sizes else ()
        numbers = box.offset + sum(grid * stride for grid, stride in zip(grids, box.strides, strict=True))
        expected = logical_indices(layout, at)
        assert torch.as_tensor(numbers).expand(box.sizes).reshape(-1).tolist() == expected.reshape(-1).tolist()


def test_partial_pieces_reduce() -> None:
    whole = torch.randn(3, 4)
    layout = Layout((3, 4), (("x", Partial("sum")),))
    torch.testing.assert_close(assemble([({"x": 0}, whole - 1), ({"x": 1}, torch.ones(3, 4))], layout), whole)
    layout = Layout((3, 4), (("x", Partial("max")),))
    torch.testing.assert_close(assemble([({"x": 0}, whole - 1), ({"x": 1}, whole)], layout), whole)


def test_a_fused_dim_reads_as_digits() -> None:
    layout = Layout((24, 8), (("x", Shard(0, 2, outer=3)),))
    assert layout.digits(0) == (Digit(3), Digit(2, "x"), Digit(4))
    assert str(layout) == "[3*2@x*4, 8]"
    assert layout.ranges(0, {"x": 1}) == [(4, 8), (12, 16), (20, 24)]


def test_ragged_pieces_are_those_of_torch_chunk() -> None:
    whole = torch.arange(7)
    layout = Layout((7,), (("x", Shard(0, 4)),))
    assert layout.is_ragged(0)
    for index, chunk in enumerate(whole.chunk(4)):
        assert torch.equal(shard_of(whole, layout, {"x": index}), chunk)


def test_overlapping_shards_are_refused() -> None:
    layout = Layout((8,), (("x", Shard(0, 2)),))
    with pytest.raises(AssertionError):
        layout.with_placement("y", Shard(0, 2))
    assert layout.with_placement("y", Shard(0, 2, outer=2)).local_shape({"x": 0, "y": 0}) == (2,)


def test_with_placement_keeps_the_order_of_axes_and_drops_replicas() -> None:
    layout = Layout((8, 8)).with_placement("x", Shard(0, 2)).with_placement("y", Shard(1, 2))
    assert [axis for axis, _ in layout.axes] == sorted(("x", "y"), key=AXES.index)
    assert layout.with_placement("x", Replicate()).with_placement("y", Replicate()) == Layout((8, 8))
