"""A schedule reads back from what it prints, and a broken one is rejected at its first wrong action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import SCHEDULE_NAMES, Schedule, build_schedule, check_trains, forward_only, peak_in_flight

built = st.builds(build_schedule, st.sampled_from(SCHEDULE_NAMES), st.integers(1, 8), st.integers(1, 32))


@given(built)
def test_a_schedule_reads_back_from_what_it_prints(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule), schedule.name) == schedule


@given(built)
def test_a_forward_only_schedule_reads_back_from_what_it_prints(schedule: Schedule) -> None:
    evaluation = forward_only(schedule)
    assert Schedule.parse(str(evaluation), evaluation.name) == evaluation


def test_a_schedule_prints_one_line_per_rank() -> None:
    assert str(build_schedule("1f1b", 2, 2)) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_forward_only_keeps_the_forwards_in_order() -> None:
    evaluation = forward_only(build_schedule("eager-1f1b", 2, 3))
    assert str(evaluation) == "0F0 0F1 0F2\n1F0 1F1 1F2"
    assert not evaluation.has_backward
    assert peak_in_flight(evaluation) == (1, 1)


def test_a_microbatch_with_a_split_backward_is_in_flight_until_its_weight_gradients() -> None:
    schedule = Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1\n1F0 1I0 1W0 1F1 1B1")
    assert peak_in_flight(schedule) == (2, 1)


BROKEN = {
    "not an action": ("0F0 0B0\n1F0 1X0", "rank 1, action 1: '1X0' is not an action"),
    "nothing": ("", "0 stages"),
    "a forward twice": ("0F0 0F0 0B0", "rank 0, action 1: 0F0 runs a second time"),
    "a backward twice": ("0F0 0B0 0B0", "rank 0, action 2: 0B0 runs a second time"),
    "backward before forward": ("0F0 0B1 0F1 0B0", "rank 0, action 1: 0B1 runs before 0F1"),
    "weights before inputs": ("0F0 0W0 0I0", "rank 0, action 1: 0W0 runs before 0I0"),
    "inputs after the whole": ("0F0 0B0 0I0 0W0", "rank 0, action 2: 0I0 repeats a part of 0B0"),
    "the whole after inputs": ("0F0 0I0 0W0 0B0", "rank 0, action 3: 0B0 repeats a part of 0I0"),
    "another rank's stage": (
        "0F0 0B0\n1F0 0B0",
        "rank 1, action 1: 0B0 is of stage 0, which rank 0 runs: expected all actions of a stage on one rank",
    ),
    "a missing forward": ("0F0 0F1 0B0 0B1\n1F0 1B0", "rank 1: 1F1 is missing"),
    "a missing backward": ("0F0 0B0 0F1 0B1\n1F0 1B0 1F1", "rank 1: 1B1 is missing"),
    "missing weight gradients": ("0F0 0I0", "rank 0: 0W0 is missing"),
    "a rank without backward": ("0F0 0B0\n1F0", "rank 1: 1B0 is missing"),
    "an empty rank": ("0F0 0B0\n\n2F0 2B0", "rank 1 runs nothing"),
}


@pytest.mark.parametrize(("text", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_schedule_is_rejected_at_its_first_wrong_action(text: str, problem: str) -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        Schedule.parse(text)
    assert str(caught.value).startswith(f"custom{',' if 'rank' in problem else ':'} {problem}")


def test_the_first_wrong_action_is_marked_among_its_neighbours() -> None:
    with pytest.raises(InvalidScheduleError, match=r"\.\.\. 0F1 0F2 0F3 --> 0F1 <-- 0B0 0B1 0B2 \.\.\."):
        Schedule.parse("0F0 0F1 0F2 0F3 0F1 0B0 0B1 0B2 0B3")


def test_the_place_of_a_missing_action_is_marked() -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        Schedule.parse("0F0 0F1 0F2 0B0 0B2")
    assert str(caught.value) == "custom, rank 0: 0B1 is missing\n  ... 0F1 0F2 0B0 --> 0B1? <-- 0B2"


def test_a_microbatch_beyond_the_count_is_rejected() -> None:
    actions = build_schedule("gpipe", 1, 3).ranks
    with pytest.raises(InvalidScheduleError, match="action 2: 0F2 is of microbatch 2: expected one below 2"):
        Schedule("custom", 1, 2, actions)


def test_a_schedule_for_more_stages_than_it_runs_is_rejected() -> None:
    with pytest.raises(InvalidScheduleError, match=r"custom: 2F0 is missing: no rank runs its stage\n  0F0"):
        Schedule("custom", 3, 2, build_schedule("gpipe", 2, 2).ranks)


def test_a_schedule_for_fewer_stages_than_it_runs_is_rejected() -> None:
    with pytest.raises(InvalidScheduleError, match="rank 0, action 0: 1F0 is of stage 1: expected one below 1"):
        Schedule("custom", 1, 1, (build_schedule("gpipe", 2, 1).ranks[1],))


def test_a_schedule_with_more_ranks_than_stages_is_rejected() -> None:
    with pytest.raises(InvalidScheduleError, match="3 pipe ranks for 2 stages: expected a stage or more for each"):
        Schedule("custom", 2, 1, (*build_schedule("gpipe", 2, 1).ranks, ()))


def test_a_rank_may_have_several_stages() -> None:
    schedule = Schedule.parse("0F0 2F0 2I0 0B0 2W0\n1F0 1B0")
    assert schedule.placement == (0, 1, 0)
    assert [schedule.stages_of(rank) for rank in range(2)] == [(0, 2), (1,)]
    assert [schedule.splits(stage) for stage in range(3)] == [False, False, True]
    assert [schedule.runs_whole(stage) for stage in range(3)] == [True, True, False]
    assert peak_in_flight(schedule) == (2, 1)


def test_a_schedule_without_backwards_does_not_train() -> None:
    check_trains(Schedule.parse("0F0 0I0 0W0\n1F0 1B0"))
    with pytest.raises(
        InvalidScheduleError, match=r"rank 0: 0B0 is missing.*B, or I and W.*no_grad\(\)\n  0F0 --> 0B0"
    ):
        check_trains(Schedule.parse("0F0\n1F0"))
