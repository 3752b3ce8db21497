"""Schedules go to and come from torch.distributed.pipelining in CSV files; torch's own code is the judge."""

import csv
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import SCHEDULE_NAMES, build_schedule, read_csv, write_csv


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_written_schedule_reads_back(name: str, num_microbatches: int, tmp_path: Path) -> None:
    schedule = build_schedule(name, 4, num_microbatches)
    write_csv(schedule, tmp_path / f"{name}.csv")
    assert read_csv(tmp_path / f"{name}.csv") == schedule


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_reads_and_accepts_what_is_written(name: str, tmp_path: Path) -> None:
    schedule = build_schedule(name, 4, 8)
    write_csv(schedule, tmp_path / "schedule.csv")
    with (tmp_path / "schedule.csv").open(newline="") as file:
        read = {rank: [torch_schedules._Action.from_str(s) for s in row] for rank, row in enumerate(csv.reader(file))}
    found = [tuple(map(str, actions)) for actions in read.values()]
    assert found == [tuple(map(str, actions)) for actions in schedule.ranks]
    rank_of_stage = torch_schedules._validate_schedule(read, pp_group_size=4, num_stages=4, num_microbatches=8)
    assert rank_of_stage == {0: 0, 1: 1, 2: 2, 3: 3}


def test_idle_ticks_and_torchs_gradient_reductions_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "idle.csv"
    path.write_text("0F0,0F1,,0B0, 0B1,0REDUCE_GRAD\n,1F0,1B0,1F1,1B1,1REDUCE_GRAD\n")
    assert read_csv(path).ranks == build_schedule("1f1b", 2, 2).ranks


def test_a_cell_that_is_no_action_is_named_with_file_and_position(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,1SEND_F0\n")
    with pytest.raises(InvalidScheduleError, match="mine, rank 1, action 1: '1SEND_F0' is not an action"):
        read_csv(path)
