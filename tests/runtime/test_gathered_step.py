"""The figures of a gathered step are those of its spans."""

from __future__ import annotations

import pytest

from fxpar.runtime.gathered_step import GatheredStep, RankRecord, moved_to_first_clock
from fxpar.schedule import Action, Transfer
from fxpar.schedule.timeline import COLLECTIVES, SENDS, WAIT, Span, Timeline
from fxpar.world.clock_offsets import ClockOffset

VALUE = Transfer("out0", 0, 0, (1,))
STEP = GatheredStep(
    [
        RankRecord(
            100.0,
            (
                Span.of_action(0, Action(0, "F", 0), 0.0, 40.0),
                Span(0, COLLECTIVES, "all_reduce over x", 10.0, 11.0, "start"),
                Span(0, COLLECTIVES, "wait for all_reduce over x", 20.0, 26.0, "wait"),
                Span.of_transfer(0, SENDS, VALUE, 40.0, 41.0),
            ),
            7,
        ),
        RankRecord(
            90.0,
            (
                Span.of_transfer(1, WAIT, VALUE, 5.0, 50.0),
                Span.of_action(1, Action(1, "F", 0), 50.0, 100.0),
            ),
            9,
        ),
    ],
    [ClockOffset(), ClockOffset(-3.0, 0.5)],
)


def test_the_slowest_rank_counts() -> None:
    assert STEP.step_us == 100.0
    assert STEP.bubble_share == pytest.approx(1 - (40 + 50) / 200)


def test_waits_for_collectives_and_for_what_was_sent_are_exposed() -> None:
    assert STEP.exposed_us == pytest.approx((6 + 10) / 2), "not the 35 us before the value was sent"


def test_a_timeline_moves_by_the_offset_of_its_clock() -> None:
    moved = moved_to_first_clock(Timeline(STEP.records[1].spans), STEP.offsets[1])
    assert [(span.begin_us, span.end_us) for span in moved.spans] == [(2.0, 47.0), (47.0, 97.0)]
