"""Every move between two layouts, run on all ranks, returns exactly the pieces that the needed layout describes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensorMode
from fxpar.graph.emit_redistribution import emit_step
from fxpar.graph.graph_writer import LocalGraph
from fxpar.graph.redistribute import plan_redistribution
from fxpar.ir.layout import REPLICATE, Layout, Partial, Shard
from fxpar.ir.node_meta import tensor
from fxpar.ir.strides import stride_order
from fxpar.ir.tiles import assemble, shard_of
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh, init_mesh
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.lockstep import run_ranks_in_lockstep
from tests.support.placements import fits, shards


@pytest.fixture(scope="module", params=[{"x": 2}, {"x": 3}, {"y": 2, "x": 2}, {"y": 3, "x": 2}], ids=str)
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with fake_mesh(**request.param) as made:
        yield made


def graph_of_move(have: Layout, need: Layout, like: Tensor, mesh: Mesh) -> fx.Graph:
    """The local graph that moves one value, which lies in memory as `like` does."""
    local = LocalGraph(FakeTensorMode())
    origin = fx.Graph().placeholder("origin")
    with local.on_behalf_of(origin, backward=False):
        node = local.placeholder("value", have.local_shape(mesh.coordinate), like)
        for step in plan_redistribution(have, need):
            node = emit_step(local, node, step, stride_order(like), mesh)
        local.graph.output(node)
    return local.graph


def in_order_of(piece: Tensor, whole: Tensor) -> Tensor:
    """A copy of `piece` without gaps whose dims lie in memory as those of `whole`."""
    order = stride_order(whole)
    return piece.permute(order).contiguous().permute([order.index(dim) for dim in range(piece.dim())])


def pieces_of(whole: Tensor, layout: Layout, mesh: Mesh, seed: int = 0) -> list[Tensor]:
    """The piece of every rank; random contributions where the layout is partial."""
    generator = torch.Generator().manual_seed(seed)
    places = [mesh.coordinate_of(rank) for rank in range(mesh.num_ranks)]
    partial = [axis for axis, placement in layout.axes if isinstance(placement, Partial)]
    shares = {}
    for axis in partial:
        noise = torch.randint(-8, 8, (mesh.sizes[axis] - 1, *whole.shape), generator=generator).to(whole.dtype)
        shares[axis] = noise
    values = [_contribution(whole, place, shares, layout) for place in places]
    return [in_order_of(shard_of(value, layout, place), whole) for value, place in zip(values, places, strict=True)]


def _contribution(whole: Tensor, place: dict[str, int], shares: dict[str, Tensor], layout: Layout) -> Tensor:
    """What the rank at `place` contributes so that everything together reduces to `whole`."""
    value = whole
    for axis, noise in shares.items():
        last = place[axis] == len(noise)
        if layout.placement(axis) == Partial("max"):
            value = value if last else value - noise[place[axis]].abs()
        elif value is whole:
            value = whole - noise.sum(0) if last else noise[place[axis]]
        else:  # the second summed axis splits the share of the first
            value = value - noise.sum(0) if last else noise[place[axis]]
    return value


@st.composite
def layouts_of(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    layout = Layout(shape)
    for axis in ("x", "y"):
        if mesh.sizes[axis] > 1:
            placements = [REPLICATE, Partial("sum"), Partial("max"), *shards(shape, mesh.sizes[axis])]
            fitting = [placement for placement in placements if fits(layout, placement)]
            layout = layout.with_placement(axis, draw(st.sampled_from(fitting)))
    return layout


@given(data=st.data())
def test_every_rank_ends_with_its_piece_of_the_needed_layout(mesh: Mesh, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 5, 6, 12]), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(shape))))
    have, need = data.draw(layouts_of(shape, mesh)), data.draw(layouts_of(shape, mesh))
    dtypes = [torch.float64, torch.bfloat16] + ([] if need.is_partial else [torch.int64])
    dtype = data.draw(st.sampled_from(dtypes))
    physical = torch.randint(-32, 32, [shape[dim] for dim in order]).to(dtype)
    whole = physical.permute([order.index(dim) for dim in range(len(shape))])

    graphs = [graph_of_move(have, need, whole, as_rank(mesh, rank)) for rank in range(mesh.num_ranks)]
    moved = run_ranks_in_lockstep(graphs, [[piece] for piece in pieces_of(whole, have, mesh)], mesh)

    places = [mesh.coordinate_of(rank) for rank in range(mesh.num_ranks)]
    if need.is_partial:
        named = dict(need.axes)
        once = [all(place[axis] == 0 or axis in named for axis in place) for place in places]
        pieces = [(place, piece) for place, piece, counts in zip(places, moved, once, strict=True) if counts]
        assert torch.equal(assemble(pieces, need), whole), f"{have} to {need}"
    else:
        for place, piece in zip(places, moved, strict=True):
            assert torch.equal(piece, shard_of(whole, need, place)), f"{have} to {need} at {place}"
    for piece, graph in zip(moved, graphs, strict=True):
        fake = tensor(list(graph.nodes)[-1].args[0])
        assert (piece.shape, piece.dtype) == (fake.shape, fake.dtype)
        for value in (piece, fake):
            assert value.permute(stride_order(whole)).is_contiguous(), f"{have} to {need} changes the order in memory"


MOVES = [
    (Layout((4, 5)).with_placement("x", Partial("sum")), Layout((4, 5))),
    (Layout((4, 5)).with_placement("x", Partial("max")), Layout((4, 5)).with_placement("x", Shard(1, 3))),
    (Layout((4, 5)).with_placement("x", Shard(0, 3)), Layout((4, 5))),  # pieces of 2, 2 and no rows
    (Layout((4, 5)), Layout((4, 5)).with_placement("x", Shard(1, 3))),
    (Layout((4, 5)).with_placement("x", Shard(0, 3)), Layout((4, 5)).with_placement("x", Shard(1, 3))),
    (Layout((4, 6)).with_placement("x", Partial("sum")), Layout((4, 6)).with_placement("x", Shard(1, 3, 2))),
    (Layout((4, 6)).with_placement("x", Shard(1, 3, 2)), Layout((4, 6))),
]


def wrong_moves_of_this_rank() -> list[str]:
    """Every move of `MOVES` over real process groups, in every kind of number; those whose result is wrong."""
    mesh = init_mesh(x=3)
    wrong = []
    for have, need in MOVES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool):
            if have.is_partial and not dtype.is_floating_point:
                continue
            whole = (torch.arange(math.prod(have.shape)) % 3).view(have.shape).to(dtype)
            graph = graph_of_move(have, need, whole, mesh)
            moved = fx.Interpreter(fx.GraphModule({}, graph)).run(pieces_of(whole, have, mesh)[mesh.rank])
            if not torch.equal(moved, shard_of(whole, need, mesh.coordinate)):
                wrong.append(f"{have} to {need} in {dtype}: {moved}")
    return wrong


def test_every_kind_of_move_works_between_processes_for_every_kind_of_number() -> None:
    assert run_ranks(3, wrong_moves_of_this_rank) == [[], [], []]
