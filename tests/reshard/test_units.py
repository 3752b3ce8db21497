"""Unit tasks cover the destination exactly once, and the messages made of them move a tensor from layout to layout."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import ReshardError
from fxpar.layout import Layout, Partial, Shard
from fxpar.reshard import local_slices, point_to_point, unit_tasks
from fxpar.reshard.units import box_size
from fxpar.tiles import shard_of

Places: TypeAlias = dict[int, dict[str, int]]
Case: TypeAlias = tuple[Layout, Layout, Places, Places]


def places(first_rank: int, **sizes: int) -> Places:
    """Ranks in a row, with their coordinates on the axes of the given sizes."""
    coordinates = product(*map(range, sizes.values()))
    return {first_rank + i: dict(zip(sizes, index, strict=True)) for i, index in enumerate(coordinates)}


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], sizes: dict[str, int]) -> Layout:
    """A random layout: even and ragged shards, shards that start inside a dim, two shards in one dim."""
    layout = Layout(shape)
    for axis, parts in sizes.items():
        shards = [Shard(dim, parts, outer) for dim, size in enumerate(shape) for outer in range(1, size + 1)]
        shards = [shard for shard in shards if layout.accepts(shard)]
        if parts > 1 and shards and draw(st.booleans()):
            layout = layout.with_placement(axis, draw(st.sampled_from(shards)))
    return layout


@st.composite
def reshardings(draw: st.DrawFn) -> Case:
    """Two layouts of one shape on two meshes, whose ranks are apart, the same, or partly the same."""
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    meshes = [{"y": draw(st.integers(1, 3)), "x": draw(st.integers(1, 4))} for _ in range(2)]
    source, destination = (draw(layouts(shape, sizes)) for sizes in meshes)
    first = draw(st.integers(0, 12))
    return source, destination, places(0, **meshes[0]), places(first, **meshes[1])


@given(reshardings())
def test_every_receiver_needs_each_of_its_elements_in_exactly_one_task(case: Case) -> None:
    source, destination, senders, receivers = case
    tasks = unit_tasks(source, destination, senders, receivers)
    for rank, at in receivers.items():
        covered: Counter[tuple[int, ...]] = Counter()
        for task in tasks:
            if rank in task.receivers:
                covered.update(product(*(range(*interval) for interval in task.box)))
        needed = {index for box in destination.boxes(at) for index in product(*(range(*interval) for interval in box))}
        assert covered == dict.fromkeys(needed, 1)


@given(reshardings())
def test_a_task_names_all_that_hold_its_box_and_all_that_need_it(case: Case) -> None:
    source, destination, senders, receivers = case
    for task in unit_tasks(source, destination, senders, receivers):
        for layout, ranks, named in ((source, senders, task.senders), (destination, receivers, task.receivers)):
            holders = [rank for rank, at in ranks.items() if any(_inside(task.box, box) for box in layout.boxes(at))]
            assert sorted(named) == holders


def _inside(box: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return all(low <= start and stop <= high for (start, stop), (low, high) in zip(box, other, strict=True))


@given(reshardings())
def test_messages_carried_out_give_every_receiver_its_shard(case: Case) -> None:
    source, destination, senders, receivers = case
    whole = torch.randn(source.shape)
    held = {rank: shard_of(whole, source, at) for rank, at in senders.items()}
    pieces = {rank: torch.full(destination.local_shape(at), torch.nan) for rank, at in receivers.items()}
    for message in point_to_point(unit_tasks(source, destination, senders, receivers)):
        sent = held[message.sender][local_slices(message.box, source, senders[message.sender])]
        taken = local_slices(message.box, destination, receivers[message.receiver])
        assert pieces[message.receiver][taken].isnan().all(), "written twice"
        pieces[message.receiver][taken] = sent
    for rank, at in receivers.items():
        assert torch.equal(pieces[rank], shard_of(whole, destination, at))


@given(reshardings())
def test_a_rank_that_holds_what_it_needs_asks_nobody_else(case: Case) -> None:
    source, destination, senders, receivers = case
    tasks = unit_tasks(source, destination, senders, receivers)
    holders = {task.box: task.senders for task in tasks}
    for message in point_to_point(tasks):
        assert message.sender == message.receiver or message.receiver not in holders[message.box]


def test_replicas_share_the_load_of_sending() -> None:
    tasks = unit_tasks(Layout((8, 3)), Layout((8, 3), (("x", Shard(0, 4)),)), places(0, x=2), places(2, x=4))
    sent: Counter[int] = Counter()
    for message in point_to_point(tasks):
        sent[message.sender] += box_size(message.box)
    assert sent == {0: 12, 1: 12}


@pytest.mark.parametrize(
    ("source", "destination", "meshes", "count"),
    [
        ({"y": 0}, {"y": 0}, ((2, 4), (2, 4)), 2),
        ({}, {"y": 0}, ((2, 4), (2, 4)), 2),
        ({"y": 1}, {"y": 0}, ((2, 4), (2, 4)), 4),
        ({"x": 0}, {"y": 0}, ((2, 4), (2, 4)), 4),
        ({"y": 0}, {"y": 0}, ((2, 4), (3, 4)), 4),
        ({"x": 0}, {}, ((1, 4), (2, 4)), 4),
        ({}, {}, ((2, 3), (3, 2)), 1),
        ({"y": 1}, {"y": 2}, ((2, 4), (2, 4)), 4),
    ],
)
def test_as_many_unit_tasks_as_the_paper_counts(
    source: dict[str, int], destination: dict[str, int], meshes: tuple[tuple[int, int], tuple[int, int]], count: int
) -> None:
    """Zhuang et al., table 2; the hosts of a mesh are y, the devices of a host x."""
    sizes = [{"y": hosts, "x": devices} for hosts, devices in meshes]
    ends = []
    for dims, size in zip((source, destination), sizes, strict=True):
        layout = Layout((24, 24, 24))
        for axis, dim in dims.items():
            layout = layout.with_placement(axis, Shard(dim, size[axis]))
        ends.append(layout)
    assert len(unit_tasks(*ends, places(0, **sizes[0]), places(12, **sizes[1]))) == count


def test_shards_over_both_axes_make_a_task_of_every_pair_of_tiles() -> None:
    """Zhuang et al., table 2, case 4: RS01R -> S01RR on 2 x 4 devices each."""
    source = Layout((16, 16, 4), (("y", Shard(1, 2)), ("x", Shard(1, 4, outer=2))))
    destination = Layout((16, 16, 4), (("y", Shard(0, 2)), ("x", Shard(0, 4, outer=2))))
    assert len(unit_tasks(source, destination, places(0, y=2, x=4), places(8, y=2, x=4))) == 64


def test_uneven_shards_give_tasks_of_their_own_sizes() -> None:
    """Zhuang et al., table 2, case 6: from 2 hosts to 3."""
    source, destination = (Layout((6,), (("y", Shard(0, parts)),)) for parts in (2, 3))
    tasks = unit_tasks(source, destination, places(0, y=2), places(2, y=3))
    assert [box_size(task.box) for task in tasks] == [2, 1, 1, 2]


def test_unreduced_values_are_refused() -> None:
    partial = Layout((4,), (("x", Partial()),))
    with pytest.raises(ReshardError, match=r"cannot reshard from .*P\(sum\)@x.*reduce them first"):
        unit_tasks(partial, Layout((4,)), places(0, x=2), places(2, x=2))
    with pytest.raises(ReshardError, match="reduce them first"):
        unit_tasks(Layout((4,)), partial, places(0, x=2), places(2, x=2))


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ReshardError, match=r"from shape \(4,\) to \(2, 2\)"):
        unit_tasks(Layout((4,)), Layout((2, 2)), places(0, x=2), places(2, x=2))
