"""Schedules in the CSV format "compute_only" of torch.distributed.pipelining: one row per rank."""

from __future__ import annotations

import csv
from pathlib import Path

from fxpar.schedule.schedule import Schedule, schedule_from_cells


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write `schedule` so that torch's schedule runtime can load it."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([str(action) for action in actions] for actions in schedule.ranks)


def read_csv(path: Path) -> Schedule:
    """The schedule in `path`, named after the file.

    Raises InvalidScheduleError for what is not an action and for an incomplete schedule.
    """
    with path.open(newline="") as file:
        return schedule_from_cells([_actions_only(row) for row in csv.reader(file)], name=path.stem)


def _actions_only(row: list[str]) -> list[str]:
    """Without idle ticks, and without torch's reduction of gradients, which here always ends the step."""
    return [cell.strip() for cell in row if cell.strip() and not cell.strip().endswith("REDUCE_GRAD")]
