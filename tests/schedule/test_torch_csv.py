"""Schedules go to and come from torch.distributed.pipelining in CSV files; torch's own code is the judge."""

import csv
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import SCHEDULE_NAMES, build_schedule, read_csv, write_csv


def _as_torch_reads(path: Path) -> dict[int, list[torch_schedules._Action | None]]:
    with path.open(newline="") as file:
        return {rank: [torch_schedules._Action.from_str(s) for s in row] for rank, row in enumerate(csv.reader(file))}


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
    read = _as_torch_reads(tmp_path / "schedule.csv")
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


def test_torch_reads_and_accepts_several_stages_per_rank(tmp_path: Path) -> None:
    schedule = build_schedule("interleaved", 4, 6, num_ranks=2)
    write_csv(schedule, tmp_path / "schedule.csv")
    read = _as_torch_reads(tmp_path / "schedule.csv")
    placement = torch_schedules._validate_schedule(read, pp_group_size=2, num_stages=4, num_microbatches=6)
    assert placement == {0: 0, 1: 1, 2: 0, 3: 1}


def test_a_forward_and_a_backward_that_torch_overlaps_run_one_after_the_other(tmp_path: Path) -> None:
    overlapped = torch_schedules._Action.from_str("(0F1;0B0)OVERLAP_F_B")
    assert overlapped is not None
    path = tmp_path / "overlapped.csv"
    path.write_text(f"0F0,{overlapped},0B1\n")
    assert str(read_csv(path)) == "0F0 0F1 0B0 0B1"
