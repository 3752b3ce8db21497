"""Schedules in the CSV format "compute_only" of torch.distributed.pipelining: one row per rank."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fxpar.schedule.schedule import Schedule, schedule_from_cells

_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write `schedule` so that torch's schedule runtime can load it."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([str(action) for action in actions] for actions in schedule.ranks)


def read_csv(path: Path) -> Schedule:
    """The schedule in `path`, named after the file.

    Raises InvalidScheduleError for what is not an action and for an incomplete schedule.
    """
    with path.open(newline="") as file:
        return schedule_from_cells([cells_of(row) for row in csv.reader(file)], name=path.stem)


def cells_of(row: Iterable[str]) -> list[str]:
    """The computations in a row: all cells except idle ticks and torch's reductions of gradients.

    Here, gradients are reduced after the last action of their stage.
    A forward and a backward that torch overlaps, as in "(0F1;1B0)OVERLAP_F_B", run one after the other.
    """
    return [action for cell in row for action in _actions_of(cell.strip())]


def _actions_of(cell: str) -> Iterator[str]:
    if overlapped := _OVERLAPPED.fullmatch(cell):
        yield from (part.strip() for part in overlapped.group(1).split(";") if part.strip())
    elif cell and not cell.endswith("REDUCE_GRAD"):
        yield cell
