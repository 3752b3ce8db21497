"""Read schedules that users give, in any of the accepted forms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from fxpar.errors import InvalidScheduleError, UnknownScheduleError
from fxpar.schedule.action import Action, is_action
from fxpar.schedule.build import SCHEDULE_NAMES
from fxpar.schedule.schedule import Schedule, schedule_from_cells
from fxpar.schedule.torch_csv import cells_of, read_csv

GivenSchedule: TypeAlias = Schedule | str | Path | Sequence[Sequence[str | Action]]
"""A name, or a user's own schedule in a form that `read_schedule` takes."""


def schedule_text(given: GivenSchedule) -> str:
    """The name of a schedule, or a user's own as text, one line of actions per rank: the form that a plan stores.

    Raises:
        UnknownScheduleError, InvalidScheduleError: as in `read_schedule`.
    """
    return given if isinstance(given, str) and given in SCHEDULE_NAMES else str(read_schedule(given))


def read_schedule(given: GivenSchedule) -> Schedule:
    """The schedule that is `given`.

    Args:
        given: a `Schedule`, the path to a CSV file of torch.distributed.pipelining (as a str, if it ends in ".csv"), a
            text with a line of actions such as "0F0 0F1 0B0 0B1" per rank, or a sequence of actions per rank.

    Raises:
        UnknownScheduleError: it is a single word that is not an action, or of another type.
        InvalidScheduleError: it has something that is not an action, or the schedule is not complete.
    """
    if isinstance(given, Schedule):
        return given
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".csv")):
        return _read_file(Path(given))
    if isinstance(given, str):
        if len(given.split()) == 1 and not is_action(given.strip()):
            raise UnknownScheduleError(given, SCHEDULE_NAMES)
        given = [line.split() for line in given.strip().splitlines()]
    if not isinstance(given, Sequence):
        raise UnknownScheduleError(repr(given), SCHEDULE_NAMES)
    return schedule_from_cells([cells_of(map(str, row)) for row in given], "custom")


def check_fits(schedule: Schedule, num_ranks: int, num_stages: int, num_microbatches: int) -> None:
    """Raise InvalidScheduleError unless `schedule` has these numbers of pipe ranks, stages and microbatches."""
    found = len(schedule.ranks), schedule.num_stages, schedule.num_microbatches
    expected = num_ranks, num_stages, num_microbatches
    if found != expected:
        raise InvalidScheduleError(
            f"{schedule.name}: it has actions for {_counts(*found)}: expected {_counts(*expected)}; change "
            f"the schedule, or the stages, mesh and microbatches of the model\n  {_first_actions(schedule)}"
        )


def _read_file(path: Path) -> Schedule:
    try:
        return read_csv(path)
    except OSError as error:
        raise InvalidScheduleError(
            f"{path}: expected a CSV file with a row of actions per pipe rank: {error}"
        ) from None


def _counts(num_ranks: int, num_stages: int, num_microbatches: int) -> str:
    return f"{num_stages} stages on {num_ranks} pipe ranks, and {num_microbatches} microbatches"


def _first_actions(schedule: Schedule) -> str:
    """A line per rank, truncated if it is long."""
    lines = (" ".join(map(str, actions[:12])) + (" ..." if len(actions) > 12 else "") for actions in schedule.ranks)
    return "\n  ".join(lines)
