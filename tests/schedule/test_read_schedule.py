"""Users write schedules as text, lists or files; one that does not fit is refused."""

from pathlib import Path

import pytest

from fxpar.errors import InvalidScheduleError, UnknownScheduleError
from fxpar.schedule import INTERLEAVED, Action, build_schedule, check_fits, read_schedule, write_csv

TEXT = "0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1W0 1B1"


def test_a_schedule_is_read_from_all_that_it_can_be_written_as(tmp_path: Path) -> None:
    schedule = read_schedule(TEXT)
    assert str(schedule) == TEXT
    assert read_schedule(schedule) is schedule
    assert read_schedule([line.split() for line in TEXT.splitlines()]) == schedule
    assert read_schedule(schedule.ranks) == schedule
    assert read_schedule([["0F0", Action(0, "B", 0)]]).ranks == ((Action(0, "F", 0), Action(0, "B", 0)),)
    write_csv(schedule, tmp_path / "custom.csv")
    assert read_schedule(tmp_path / "custom.csv") == schedule
    assert read_schedule(str(tmp_path / "custom.csv")) == schedule


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidScheduleError, match=r"nowhere.csv: expected a CSV file with a row of actions per pipe"):
        read_schedule(tmp_path / "nowhere.csv")


def test_a_word_that_is_no_schedule_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnknownScheduleError, match="did you mean 'gpipe'"):
        read_schedule("gpip")


@pytest.mark.parametrize("given", ["0F0 0X0", [["0F0", "0X0"]]])
def test_what_is_no_action_is_named_with_its_place(given: str | list[list[str]]) -> None:
    with pytest.raises(InvalidScheduleError, match="custom, rank 0, action 1: '0X0' is not an action"):
        read_schedule(given)


def test_a_schedule_that_fits_is_accepted() -> None:
    check_fits(build_schedule("1f1b", 4, 8), 4, 4, 8)
    check_fits(build_schedule(INTERLEAVED, 4, 8, num_ranks=2), 2, 4, 8)


@pytest.mark.parametrize(("ranks", "stages", "microbatches"), [(4, 4, 2), (2, 4, 2), (2, 2, 3)])
def test_a_schedule_for_something_else_is_refused_with_its_actions(ranks: int, stages: int, microbatches: int) -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        check_fits(read_schedule(TEXT), ranks, stages, microbatches)
    assert str(caught.value) == (
        "custom: it has actions for 2 stages on 2 pipe ranks, and 2 microbatches: expected "
        f"{stages} stages on {ranks} pipe ranks, and {microbatches} microbatches; "
        "change the schedule, or the stages, mesh and microbatches of the model\n"
        "  0F0 0F1 0B0 0B1\n  1F0 1I0 1F1 1W0 1B1"
    )
