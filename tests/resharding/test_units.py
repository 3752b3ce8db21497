"""Unit tasks cover the destination exactly once, and name all who hold and all who need each region."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given

from fxpar.ir.layout import Layout, Shard
from fxpar.ir.tiles import shard_of
from fxpar.resharding.tile import Tile
from fxpar.resharding.units import unit_tasks
from tests.resharding.layouts import Case, cases, places, tiles


@given(cases())
def test_every_receiver_needs_each_of_its_elements_in_exactly_one_task(case: Case) -> None:
    tasks = unit_tasks(*case.tiles())
    for rank, at in case.receivers.items():
        covered = torch.zeros(case.destination.shape, dtype=torch.int64)
        for task in tasks:
            if rank in task.receivers:
                for box in product(*task.region.ranges):
                    covered[tuple(slice(*interval) for interval in box)] += 1
        assert (shard_of(covered, case.destination, at) == 1).all()
        assert covered.sum() == shard_of(covered, case.destination, at).numel(), "more than it needs"


@given(cases())
def test_a_task_names_all_that_hold_its_region_and_all_that_need_it(case: Case) -> None:
    held, needed = case.tiles()
    for task in unit_tasks(held, needed):
        for tiles_of_side, named in ((held, task.senders), (needed, task.receivers)):
            holders = [rank for rank, tile in tiles_of_side.items() if tile.intersect(task.region) == task.region]
            assert list(named) == holders


@given(cases())
def test_tasks_carried_out_give_every_receiver_its_piece(case: Case) -> None:
    whole = torch.randn(case.source.shape)
    held, needed = case.tiles()
    pieces = {rank: torch.full(tile.shape, torch.nan) for rank, tile in needed.items()}
    for task in unit_tasks(held, needed):
        sender = task.senders[-1]
        mine = shard_of(whole, case.source, case.senders[sender])
        dense = torch.full(task.region.shape, torch.nan)
        for here, there in held[sender].parts(task.region):
            dense[there] = mine[here]
        for rank in task.receivers:
            for here, there in needed[rank].parts(task.region):
                pieces[rank][here] = dense[there]
    for rank, at in case.receivers.items():
        assert torch.equal(pieces[rank], shard_of(whole, case.destination, at))


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
    for dims, size, first in zip((source, destination), sizes, (0, 12), strict=True):
        layout = Layout((24, 24, 24))
        for axis, dim in dims.items():
            layout = layout.with_placement(axis, Shard(dim, size[axis]))
        ends.append(tiles(layout, places(first, **size)))
    assert len(unit_tasks(*ends)) == count


def test_shards_over_both_axes_make_a_task_of_every_pair_of_tiles() -> None:
    """Zhuang et al., table 2, case 4: RS01R -> S01RR on 2 x 4 devices each."""
    source = Layout((16, 16, 4), (("y", Shard(1, 2)), ("x", Shard(1, 4, outer=2))))
    destination = Layout((16, 16, 4), (("y", Shard(0, 2)), ("x", Shard(0, 4, outer=2))))
    assert len(unit_tasks(tiles(source, places(0, y=2, x=4)), tiles(destination, places(8, y=2, x=4)))) == 64


def test_uneven_shards_give_tasks_of_their_own_sizes() -> None:
    """Zhuang et al., table 2, case 6: from 2 hosts to 3."""
    source, destination = (Layout((6,), (("y", Shard(0, parts)),)) for parts in (2, 3))
    tasks = unit_tasks(tiles(source, places(0, y=2)), tiles(destination, places(2, y=3)))
    assert [task.num_elements for task in tasks] == [2, 1, 1, 2]


def test_a_tile_of_many_intervals_is_still_one_task() -> None:
    """A flattened (batch, sequence) dim that is sharded by sequence."""
    by_sequence = Layout((64, 4), (("x", Shard(0, 2, outer=8)),))
    (held, _), (needed, _) = (tiles(by_sequence, places(first, x=2)).values() for first in (0, 2))
    (task,) = unit_tasks({0: held}, {2: needed})
    assert task.region == held == needed
    assert held.parts(task.region) == [((slice(0, 32), slice(0, 4)), (slice(0, 32), slice(0, 4)))]


def test_a_tile_prints_its_intervals() -> None:
    assert str(Tile((((0, 2), (4, 6)), ((0, 3),), ()))) == "[0:2+4:6, 0:3, -]"
