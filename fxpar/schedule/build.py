"""The schedules that have a name: they differ in how many forwards a stage runs before its first backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fxpar.errors import UnknownScheduleError
from fxpar.schedule.action import Action
from fxpar.schedule.schedule import Schedule


def gpipe_warm_up(stage: int, num_stages: int, num_microbatches: int) -> int:
    """All forwards, then all backwards (Huang et al., GPipe)."""
    return num_microbatches


def one_f_one_b_warm_up(stage: int, num_stages: int, num_microbatches: int) -> int:
    """As few forwards as keep every stage busy: one for this stage and for each that follows."""
    return min(num_microbatches, num_stages - stage)


def eager_one_f_one_b_warm_up(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Twice the distance to the last stage, and one: each microbatch's way there and back has time to be
    communicated while others compute (Zhuang et al., eager-1F1B).
    """
    return min(num_microbatches, 2 * (num_stages - stage) - 1)


_WARM_UPS: Mapping[str, Callable[[int, int, int], int]] = {
    "gpipe": gpipe_warm_up,
    "1f1b": one_f_one_b_warm_up,
    "eager-1f1b": eager_one_f_one_b_warm_up,
}
SCHEDULE_NAMES = tuple(_WARM_UPS)


def build_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule called `name`, one of `SCHEDULE_NAMES`, for any count of stages and microbatches from 1.

    Raises UnknownScheduleError for another name, InvalidScheduleError for a count below 1.
    """
    if name not in _WARM_UPS:
        raise UnknownScheduleError(name, SCHEDULE_NAMES)
    warm_ups = [_WARM_UPS[name](stage, num_stages, num_microbatches) for stage in range(num_stages)]
    ranks = tuple(_alternate(stage, warm_up, num_microbatches) for stage, warm_up in enumerate(warm_ups))
    return Schedule(name, num_stages, num_microbatches, ranks)


def _alternate(stage: int, warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then backward and forward in turn, then the backwards that are left."""
    actions = [Action(stage, "F", microbatch) for microbatch in range(warm_up)]
    for microbatch in range(num_microbatches):
        actions.append(Action(stage, "B", microbatch))
        if warm_up + microbatch < num_microbatches:
            actions.append(Action(stage, "F", warm_up + microbatch))
    return tuple(actions)
