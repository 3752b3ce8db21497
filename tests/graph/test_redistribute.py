"""Plans of moves: which steps, in which order, at what cost."""

from __future__ import annotations

import pytest

from fxpar.graph.redistribute import RedistributeKind, plan_redistribution, traffic
from fxpar.ir.layout import REPLICATE, Layout, Partial, Placement, Shard

WHOLE = Layout((8, 8))


def laid_out(**axes: Placement) -> Layout:
    layout = WHOLE
    for axis, placement in axes.items():
        layout = layout.with_placement(axis, placement)
    return layout


@pytest.mark.parametrize(
    ("have", "need", "kind"),
    [
        (Partial(), REPLICATE, RedistributeKind.ALL_REDUCE),
        (Partial(), Shard(0, 2), RedistributeKind.REDUCE_SCATTER),
        (Shard(1, 2), REPLICATE, RedistributeKind.ALL_GATHER),
        (Shard(1, 2), Shard(0, 2), RedistributeKind.ALL_TO_ALL),
        (Shard(0, 2), Shard(0, 2, 4), RedistributeKind.ALL_TO_ALL),
        (REPLICATE, Shard(0, 2), RedistributeKind.SLICE),
        (REPLICATE, Partial(), RedistributeKind.CONTRIBUTE),
    ],
    ids=str,
)
def test_one_change_along_one_axis_is_one_step(have: Placement, need: Placement, kind: RedistributeKind) -> None:
    (step,) = plan_redistribution(laid_out(x=have), laid_out(x=need))
    assert (step.axis, step.kind) == ("x", kind)


def test_a_value_that_lies_right_takes_no_step() -> None:
    assert plan_redistribution(laid_out(x=Shard(0, 2)), laid_out(x=Shard(0, 2))) == []


def test_what_makes_a_value_smaller_comes_first() -> None:
    steps = plan_redistribution(laid_out(y=Shard(0, 2), x=Partial()), laid_out(x=Shard(1, 2)))
    assert [(step.axis, step.kind) for step in steps] == [
        ("x", RedistributeKind.REDUCE_SCATTER),
        ("y", RedistributeKind.ALL_GATHER),
    ]


def test_a_digit_that_another_axis_holds_is_gathered_first() -> None:
    steps = plan_redistribution(laid_out(y=Shard(0, 2)), laid_out(x=Shard(0, 2)))
    assert [(step.axis, step.kind) for step in steps] == [
        ("y", RedistributeKind.ALL_GATHER),
        ("x", RedistributeKind.SLICE),
    ]


def test_axes_that_trade_places_get_past_each_other() -> None:
    have, need = laid_out(y=Shard(0, 2), x=Shard(0, 2, 2)), laid_out(y=Shard(0, 2, 2), x=Shard(0, 2))
    steps = plan_redistribution(have, need)
    assert steps[0].before == have
    assert steps[-1].after == need
    assert sum(step.kind is RedistributeKind.ALL_GATHER for step in steps) == 1


def test_a_shard_that_cannot_stand_beside_the_old_one_goes_by_the_whole() -> None:
    thirds, inner = Shard(0, 2), Shard(0, 2, 3)
    steps = plan_redistribution(Layout((12,)).with_placement("x", thirds), Layout((12,)).with_placement("x", inner))
    assert [step.kind for step in steps] == [RedistributeKind.ALL_GATHER, RedistributeKind.SLICE]


def test_ring_traffic_counts_what_a_rank_sends() -> None:
    sizes = {"x": 4}
    quarter = laid_out(x=Shard(0, 4))
    assert traffic(plan_redistribution(laid_out(x=Partial()), WHOLE), sizes) == (2 * 3 / 4 * 64, 1)
    assert traffic(plan_redistribution(quarter, WHOLE), sizes) == (3 / 4 * 64, 1)
    assert traffic(plan_redistribution(laid_out(x=Partial()), quarter), sizes) == (3 / 4 * 64, 1)
    assert traffic(plan_redistribution(quarter, laid_out(x=Shard(1, 4))), sizes) == (3 / 4 * 16, 1)
    assert traffic(plan_redistribution(WHOLE, quarter), sizes) == (0, 1)
