"""The checker finds ranks that wait for each other, and what each of them waits for."""

import pytest

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import Edge, Schedule, check_programs, lower


def test_ranks_that_wait_for_each_other_are_reported_with_what_they_wait_for() -> None:
    schedule, edges = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), [Edge("h", 0, (1,))]
    with pytest.raises(InvalidScheduleError) as caught:
        check_programs(lower(schedule, edges), schedule, edges)
    assert str(caught.value).splitlines() == [
        "custom: deadlock: these ranks wait for each other",
        "  rank 0, instruction 5: wait gradient of h[0] 1->0",
        "    0F0 --> 0B0 <-- 0F1 0B1",
        "  rank 1, instruction 5: wait h[1] 0->1",
        "    1F0 --> 1F1 <-- 1B0 1B1",
    ]


PASSED_ON = [Edge("h", 0, (2, 3)), Edge("used", 1, (3,)), Edge("late", 1, (2,), differentiable=False)]
"""Rank 2 passes h on to rank 3; rank 3's backward lets rank 1 go on, for whose next value rank 2 waits."""
RANK_2_IN_ANOTHER_ORDER = Schedule.parse(
    "0F0 0F1 0B0 0B1\n"
    "1F1 1B1 1F0 1B0\n"
    "2F0 2F1 2B0 2B1\n"
    "3F1 3B1 3F0 3B0"
)  # fmt: skip


def test_a_multicast_that_a_rank_would_pass_on_too_late_is_a_deadlock() -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        check_programs(lower(RANK_2_IN_ANOTHER_ORDER, PASSED_ON, lookahead=1), RANK_2_IN_ANOTHER_ORDER, PASSED_ON)
    assert str(caught.value).splitlines() == [
        "custom: deadlock: these ranks wait for each other",
        "  rank 0, instruction 9: wait gradient of h[0] 2->0",
        "    0F0 0F1 --> 0B0 <-- 0B1",
        "  rank 1, instruction 5: wait gradient of used[1] 3->1",
        "    1F1 --> 1B1 <-- 1F0 1B0",
        "  rank 2, instruction 3: wait late[0] 1->2",
        "    --> 2F0 <-- 2F1 2B0 2B1",
        "  rank 3, instruction 4: wait h[1] 0->2,3, which is not passed on before its receive is posted on rank 2",
        "    --> 3F1 <-- 3B1 3F0 3B0",
    ]


def test_a_multicast_is_passed_on_in_time_if_its_receive_is_posted_early() -> None:
    check_programs(lower(RANK_2_IN_ANOTHER_ORDER, PASSED_ON, lookahead=2), RANK_2_IN_ANOTHER_ORDER, PASSED_ON)


def test_without_passing_on_the_same_order_is_no_deadlock() -> None:
    edges = [Edge("to2", 0, (2,)), Edge("to3", 0, (3,)), *PASSED_ON[1:]]
    check_programs(lower(RANK_2_IN_ANOTHER_ORDER, edges, lookahead=0), RANK_2_IN_ANOTHER_ORDER, edges)
