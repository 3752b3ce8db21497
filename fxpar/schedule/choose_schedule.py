"""From the schedule that a user asks for to the schedule of this model on this mesh."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors import InvalidScheduleError, InvalidStagesError
from fxpar.schedule import (
    NAMED_SCHEDULES,
    Costs,
    Schedule,
    build_schedule,
    check_fits,
)

_STAGES_PER_RANK = 2
"""The default for schedules with several stages per rank."""


def num_stages_of(schedule: str, pipe_ranks: int) -> int:
    """The default number of stages into which a model is split."""
    if (named := NAMED_SCHEDULES.get(schedule)) is None:
        return Schedule.parse(schedule).num_stages
    return _STAGES_PER_RANK * pipe_ranks if named.shares_ranks else pipe_ranks


def choose_placement(schedule: str, num_stages: int, pipe_ranks: int) -> tuple[int, ...]:
    """The pipe rank of each stage.

    Raises:
        InvalidStagesError: the schedule does not run this number of stages on this mesh.
    """
    if (named := NAMED_SCHEDULES.get(schedule)) is None:
        own = Schedule.parse(schedule)
        if (own.num_stages, len(own.ranks)) != (num_stages, pipe_ranks):
            raise InvalidStagesError(
                f"stages: the schedule runs {own.num_stages} stages on {len(own.ranks)} pipe ranks, but the model has "
                f"{num_stages} and the mesh has pipe={pipe_ranks}; change the schedule, the stages, or the mesh"
            )
        return own.placement
    if named.shares_ranks and num_stages % pipe_ranks == 0:
        return tuple(stage % pipe_ranks for stage in range(num_stages))
    if num_stages != pipe_ranks:
        wanted = f"a multiple of {pipe_ranks}" if named.shares_ranks else f"{pipe_ranks}"
        raise InvalidStagesError(
            f"stages: the model has {num_stages} stages, but the mesh has pipe={pipe_ranks}, for which "
            f"{schedule!r} runs {wanted}; name that many modules less one that open a stage, or change the mesh"
        )
    return tuple(range(num_stages))


def choose_schedule(schedule: str, costs: Costs, pipe_ranks: int, microbatches: int) -> Schedule:
    """The schedule with this name or text (see `schedule_text`), for stages with these costs.

    Raises:
        InvalidScheduleError: the user's own schedule is for other counts of ranks, stages or microbatches.
    """
    if (named := NAMED_SCHEDULES.get(schedule)) is None:
        own = Schedule.parse(schedule)
        check_fits(own, pipe_ranks, costs.num_stages, microbatches)
        return own
    delays = costs.weight_delays(microbatches) if named.delays_by_costs else None
    return build_schedule(schedule, costs.num_stages, microbatches, num_ranks=pipe_ranks, delays=delays)


def check_placement(schedule: Schedule, placement: Sequence[int]) -> None:
    """Refuse a schedule with another placement than the model's parameters have.

    Raises:
        InvalidScheduleError: it runs some stage on another rank.
    """
    if schedule.placement != tuple(placement):
        raise InvalidScheduleError(
            f"{schedule.name}: it runs stages on pipe ranks {schedule.placement}, but the model was distributed for "
            f"{tuple(placement)}; give this schedule to `distribute`"
        )
