"""The named schedules have the orders of their papers, for any count of stages and microbatches."""

from itertools import product, takewhile

import pytest

from fxpar.errors import InvalidScheduleError, UnknownScheduleError
from fxpar.schedule import SCHEDULE_NAMES, build_schedule, peak_in_flight

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
EVERY_SIZE = list(product(range(1, 9), range(1, 33)))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
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


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
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
    for num_stages, num_microbatches in EVERY_SIZE:
        for actions in build_schedule(name, num_stages, num_microbatches).ranks:
            for kind in "FB":
                found = [action.microbatch for action in actions if action.kind == kind]
                assert found == list(range(num_microbatches))


def test_an_unknown_name_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(UnknownScheduleError, match=r"'1f1f'.*'gpipe', '1f1b', 'eager-1f1b'; did you mean '1f1b'"):
        build_schedule("1f1f", 4, 8)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 0), (4, -1), (0, 4)])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_counts_below_one_are_rejected(name: str, num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(InvalidScheduleError, match=f"{num_stages} stages and {num_microbatches} microbatches"):
        build_schedule(name, num_stages, num_microbatches)
