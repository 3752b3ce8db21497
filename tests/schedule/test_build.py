"""The named schedules have the orders of their papers, for any count of stages and microbatches."""

from itertools import accumulate, product, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import InvalidScheduleError, UnknownScheduleError
from fxpar.schedule import (
    DELAYED,
    INTERLEAVED,
    SCHEDULE_NAMES,
    Action,
    build_schedule,
    peak_in_flight,
    weight_delays,
)

GPIPE = "F1 F2 F3 F4 F5 F6 F7 F8 B1 B2 B3 B4 B5 B6 B7 B8"
LAST_STAGE = "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"
FOUR_STAGES_EIGHT_MICROBATCHES = {  # microbatches from 1, as the papers count
    "gpipe": [GPIPE, GPIPE, GPIPE, GPIPE],
    "1f1b": [
        "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8",
        "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 B7 B8",
        "F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 F8 B7 B8",
        LAST_STAGE,
    ],
    "eager-1f1b": [
        "F1 F2 F3 F4 F5 F6 F7 B1 F8 B2 B3 B4 B5 B6 B7 B8",
        "F1 F2 F3 F4 F5 B1 F6 B2 F7 B3 F8 B4 B5 B6 B7 B8",
        "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 B7 B8",
        LAST_STAGE,
    ],
}
WHOLE = tuple(FOUR_STAGES_EIGHT_MICROBATCHES)
SPLIT = DELAYED, "zb-h1", "zb-h2"
EVERY_SIZE = list(product(range(1, 9), range(1, 33)))


@pytest.mark.parametrize("name", WHOLE)
def test_four_stages_run_eight_microbatches_in_the_papers_order(name: str) -> None:
    schedule = build_schedule(name, num_stages=4, num_microbatches=8)
    printed = [" ".join(f"{a.kind}{a.microbatch + 1}" for a in actions) for actions in schedule.ranks]
    assert printed == FOUR_STAGES_EIGHT_MICROBATCHES[name]


@pytest.mark.parametrize(
    ("name", "peaks"), [("gpipe", (8, 8, 8, 8)), ("1f1b", (4, 3, 2, 1)), ("eager-1f1b", (7, 5, 3, 1))]
)
def test_peak_of_microbatches_in_flight(name: str, peaks: tuple[int, ...]) -> None:
    assert peak_in_flight(build_schedule(name, 4, 8)) == peaks


def _warm_up(name: str, num_stages: int, num_microbatches: int, stage_from_1: int) -> int:
    to_the_last = num_stages - stage_from_1
    depth = {"gpipe": num_microbatches, "1f1b": to_the_last + 1, "eager-1f1b": 2 * to_the_last + 1}[name]
    return min(num_microbatches, depth)


@pytest.mark.parametrize("name", WHOLE)
def test_every_stage_warms_up_as_long_as_its_formula_says_then_alternates(name: str) -> None:
    for num_stages, num_microbatches in EVERY_SIZE:
        schedule = build_schedule(name, num_stages, num_microbatches)
        for stage, actions in enumerate(schedule.ranks):
            kinds = "".join(action.kind for action in actions)
            warm_up = len(list(takewhile(lambda kind: kind == "F", kinds)))
            assert warm_up == _warm_up(name, num_stages, num_microbatches, stage + 1)
            rest = num_microbatches - warm_up
            assert kinds == "F" * warm_up + "BF" * rest + "B" * (num_microbatches - rest)
            assert peak_in_flight(schedule)[stage] == warm_up


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_microbatches_run_in_order_each_forward_and_backward_once(name: str) -> None:
    kinds = "FIW" if name in SPLIT else "FB"
    for num_stages, num_microbatches in EVERY_SIZE:
        for actions in build_schedule(name, num_stages, num_microbatches).ranks:
            assert len(actions) == len(kinds) * num_microbatches
            for kind in kinds:
                found = [action.microbatch for action in actions if action.kind == kind]
                assert found == list(range(num_microbatches))


def test_zero_bubble_and_delayed_schedules_keep_as_many_microbatches_alive_as_they_promise() -> None:
    for num_stages, num_microbatches in EVERY_SIZE:
        bounds = {
            "zb-h1": [num_stages] * num_stages,  # what 1F1B has on its first stage
            "zb-h2": [2 * num_stages - 1] * num_stages,
            DELAYED: [2 * (num_stages - stage) - 1 + stage for stage in range(num_stages)],
        }
        for name, bound in bounds.items():
            peaks = peak_in_flight(build_schedule(name, num_stages, num_microbatches))
            assert peaks == tuple(min(num_microbatches, most) for most in bound), name


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_schedule_with_its_halves_joined_is_1f1b_or_eager(name: str) -> None:
    whole = "1f1b" if name == "zb-h1" else "eager-1f1b"
    for num_stages, num_microbatches in EVERY_SIZE:
        schedule = build_schedule(name, num_stages, num_microbatches)
        joined = tuple(
            tuple(Action(a.stage, "B" if a.kind == "I" else "F", a.microbatch) for a in actions if a.kind != "W")
            for actions in schedule.ranks
        )
        assert joined == build_schedule(whole, num_stages, num_microbatches).ranks


def _lags(actions: tuple[Action, ...]) -> set[int]:
    """By how many microbatches weight gradients lag behind input gradients, where both still come."""
    inputs, lags = 0, set()
    for before, action in zip((None, *actions), actions, strict=False):
        if action.kind == "W" and before is not None and before.kind == "I":
            lags.add(inputs - 1 - action.microbatch)
        inputs += action.kind == "I"
    return lags


@pytest.mark.parametrize(("name", "per_stage"), [("zb-h1", 1), ("zb-h2", 2), (DELAYED, 1)])
def test_weight_gradients_lag_by_the_delay_of_their_stage(name: str, per_stage: int) -> None:
    for stage, actions in enumerate(build_schedule(name, 4, 16).ranks):
        assert _lags(actions) == {per_stage * stage}


def test_weight_gradients_lag_by_a_given_delay_or_to_the_end() -> None:
    for stage, actions in enumerate(build_schedule(DELAYED, 4, 16, delays=(0, 3, 1, 20)).ranks):
        assert _lags(actions) == {(0, 3, 1, 15)[stage]}


def test_delayed_weight_gradients_of_two_stages() -> None:
    assert str(build_schedule(DELAYED, 2, 3, delays=(0, 1))) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\n" + (
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    )


times = st.floats(0.125, 100)


@given(st.lists(st.tuples(times, st.just(0.0) | times), min_size=1, max_size=8), st.integers(1, 32))
def test_weight_delays_are_the_fewest_that_cover_the_way_back(stages: list[tuple[float, float]], most: int) -> None:
    weights_us, gradient_us = zip(*stages, strict=True)
    delays = weight_delays(weights_us, gradient_us, most)
    for delay, weight_us, way_us in zip(delays, weights_us, accumulate(gradient_us), strict=True):
        assert delay * weight_us >= way_us or delay == most
        assert delay == 0 or (delay - 1) * weight_us < way_us


def test_nothing_is_delayed_where_there_are_no_weights_or_no_way() -> None:
    assert weight_delays([0.0, 1.0, 0.0], [0.0, 2.5, 1.0], 8) == (0, 3, 0)
    assert weight_delays([1.0, 1.0], [0.0, 0.0], 8) == (0, 0)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_interleaved_ranks_run_every_microbatch_of_each_of_their_stages_in_order(stages_per_rank: int) -> None:
    for num_ranks, num_microbatches in EVERY_SIZE:
        num_stages = num_ranks * stages_per_rank
        schedule = build_schedule(INTERLEAVED, num_stages, num_microbatches, num_ranks=num_ranks)
        assert schedule.placement == tuple(stage % num_ranks for stage in range(num_stages))
        for rank, actions in enumerate(schedule.ranks):
            assert len(actions) == 2 * stages_per_rank * num_microbatches
            for stage in schedule.stages_of(rank):
                for kind in "FB":
                    found = [a.microbatch for a in actions if (a.stage, a.kind) == (stage, kind)]
                    assert found == list(range(num_microbatches))


def test_interleaved_groups_of_microbatches_go_through_all_stages_of_a_rank() -> None:
    schedule = build_schedule(INTERLEAVED, 4, 4, num_ranks=2)
    assert str(schedule).splitlines() == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_stages_are_spread_evenly_or_one_to_a_rank() -> None:
    with pytest.raises(InvalidScheduleError, match="6 stages on 4 pipe ranks: expected a multiple of 4 stages"):
        build_schedule(INTERLEAVED, 6, 8, num_ranks=4)
    with pytest.raises(InvalidScheduleError, match=r'one stage per rank; for several .* there is "interleaved"'):
        build_schedule("1f1b", 4, 8, num_ranks=2)


def test_an_unknown_name_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(UnknownScheduleError, match=r"'1f1f'.*'gpipe', '1f1b', 'eager-1f1b',.*; did you mean '1f1b'"):
        build_schedule("1f1f", 4, 8)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 0), (4, -1), (0, 4)])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_counts_below_one_are_rejected(name: str, num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(InvalidScheduleError, match=f"{num_stages} stages and {num_microbatches} microbatches"):
        build_schedule(name, num_stages, num_microbatches)
