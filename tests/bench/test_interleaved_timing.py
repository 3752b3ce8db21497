"""Steps take turns, disturbed ones run again, and rounds that stay disturbed do not count."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fxpar.bench.measure import interleaved as timing
from fxpar.bench.measure.interleaved import (
    MOST_OTHERS,
    Sample,
    Timing,
    all_disturbed,
    disturbance,
    median_ms,
    median_ratio,
    time_interleaved,
    timings_of_ranks,
)
from fxpar.world.launch import run_ranks

QUIET, LOUD = MOST_OTHERS / 2, 2 * MOST_OTHERS


def test_a_turn_lasts_until_its_last_rank_ends() -> None:
    timings = timings_of_ranks([{"a": [Sample(1.0, QUIET, 2)]}, {"a": [Sample(3.0, QUIET, 2)]}])
    assert timings == {"a": [Timing(3.0, QUIET, 2)]}


TURNS = {
    "a": [Timing(2.0, QUIET), Timing(9.0, LOUD, 3), Timing(4.0, QUIET, 2)],
    "b": [Timing(1.0, QUIET), Timing(1.0, QUIET), Timing(1.0, LOUD, 3)],
    "c": [Timing(5.0, LOUD), Timing(7.0, LOUD), Timing(9.0, LOUD)],
}


def test_disturbed_rounds_do_not_count_unless_all_are() -> None:
    assert median_ratio(TURNS, "a", "b") == 2.0, "the first round alone disturbed neither"
    assert not all_disturbed(TURNS["a"], TURNS["b"])
    assert median_ratio(TURNS, "c", "b") == 7.0
    assert all_disturbed(TURNS["c"], TURNS["b"])
    assert [median_ms(TURNS[name]) for name in "ac"] == [3000.0, 7000.0]


def test_a_report_has_the_rounds_that_others_disturbed() -> None:
    assert disturbance(TURNS["a"]) == {
        "rounds": 3,
        "disturbed_rounds": 1,
        "runs_repeated": 3,
        "processors_of_others": QUIET,
    }


def order_of_two() -> tuple[list[str], int]:
    """The order in which a rank runs two steps, and how many samples it has of each."""
    order: list[str] = []
    steps: dict[str, Callable[[], object]] = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = time_interleaved(steps, warm_up=1, repeats=2, tries=1)
    assert set(map(len, found.values())) == {2}
    return order, len(found)


def test_steps_alternate_who_is_first() -> None:
    assert run_ranks(2, order_of_two) == [(["a", "b", "b", "a", "a", "b"], 2)] * 2


def disturbed_twice(always: bool) -> tuple[int, list[Sample]]:
    """How often a rank ran a step that others disturbed at first, or always, and the sample; told by a false clock."""
    shares = iter([LOUD, 3 * LOUD, 2 * LOUD] if always else [LOUD, 2 * LOUD, QUIET])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "share_of_others", lambda used: next(shares))
        runs: list[float] = []
        found = time_interleaved({"a": lambda: runs.append(time.monotonic())}, warm_up=0, repeats=1, tries=3)
    return len(runs), found["a"]


@pytest.mark.parametrize("always", [False, True])
def test_a_disturbed_step_runs_again_up_to_a_limit_and_the_least_disturbed_run_counts(always: bool) -> None:
    for runs, (sample,) in run_ranks(2, disturbed_twice, always):
        assert (runs, sample.tries, sample.others) == (3, 3, LOUD if always else QUIET)
