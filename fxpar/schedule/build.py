"""The named schedules.

With one stage per rank they differ in two numbers per stage: the warm-up, how many forwards it runs before its first
backward, and the delay, by how many microbatches weight gradients lag behind input gradients, if the backward is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TypeAlias

from fxpar.errors import InvalidScheduleError, UnknownScheduleError
from fxpar.schedule.action import Action
from fxpar.schedule.schedule import Schedule

Count: TypeAlias = Callable[[int, int, int], int]
"""A count for a stage, given its number, the number of stages, and the number of microbatches."""


def gpipe_warm_up(stage: int, num_stages: int, num_microbatches: int) -> int:
    """All forwards, then all backwards (Huang et al., GPipe)."""
    return num_microbatches


def one_f_one_b_warm_up(stage: int, num_stages: int, num_microbatches: int) -> int:
    """As few forwards as keep every stage busy: one for this stage, and one for each that follows."""
    return min(num_microbatches, num_stages - stage)


def eager_one_f_one_b_warm_up(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Twice the distance to the last stage plus one, so that all communication of a microbatch, to the last stage and
    back, can overlap with the computation of others (Zhuang et al., eager-1F1B).
    """
    return min(num_microbatches, 2 * (num_stages - stage) - 1)


def zero_bubble_h1_delay(stage: int, num_stages: int, num_microbatches: int) -> int:
    """As many as need no more activation memory than 1F1B on its first stage (Qi et al., Zero Bubble, section 2.1)."""
    return stage


def zero_bubble_h2_delay(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Twice as many as ZB-H1: enough to fill the whole bubble (Qi et al., Zero Bubble, section 2.2)."""
    return 2 * stage


def one_hop_delay(stage: int, num_stages: int, num_microbatches: int) -> int:
    """What `weight_delays` returns if sending a gradient to the previous stage takes as long as weight gradients."""
    return stage


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A row of `NAMED_SCHEDULES`: the properties of a schedule.

    warm_up, delay: of a schedule with one stage per rank; `delay` is None if the backward is not split. A schedule
        with several stages per rank (`shares_ranks`) has neither.
    delays_by_costs: whether the delays come from `weight_delays` if costs are known.
    is_searched: whether the planner tries this schedule by default.
    """

    warm_up: Count | None = None
    delay: Count | None = None
    delays_by_costs: bool = False
    is_searched: bool = True

    @property
    def shares_ranks(self) -> bool:
        """Whether several stages run on each rank."""
        return self.warm_up is None

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed separately from input gradients."""
        return self.delay is not None


NAMED_SCHEDULES: Mapping[str, NamedSchedule] = {
    "gpipe": NamedSchedule(gpipe_warm_up, is_searched=False),  # takes as long as 1F1B, with more memory
    "1f1b": NamedSchedule(one_f_one_b_warm_up),
    "eager-1f1b": NamedSchedule(eager_one_f_one_b_warm_up),
    "eager-1f1b-delayed": NamedSchedule(eager_one_f_one_b_warm_up, one_hop_delay, delays_by_costs=True),
    "zb-h1": NamedSchedule(one_f_one_b_warm_up, zero_bubble_h1_delay),
    "zb-h2": NamedSchedule(eager_one_f_one_b_warm_up, zero_bubble_h2_delay),
    "interleaved": NamedSchedule(is_searched=False),  # plans have one stage per rank
}
SCHEDULE_NAMES = tuple(NAMED_SCHEDULES)
INTERLEAVED, DELAYED = "interleaved", "eager-1f1b-delayed"


def named_schedule(name: str) -> NamedSchedule:
    """The properties of the schedule called `name`.

    Raises:
        UnknownScheduleError: there is none.
    """
    if name not in NAMED_SCHEDULES:
        raise UnknownScheduleError(name, SCHEDULE_NAMES)
    return NAMED_SCHEDULES[name]


def build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    delays: Sequence[int] | None = None,
) -> Schedule:
    """The schedule called `name`, one of `SCHEDULE_NAMES`, for any count of stages and microbatches from 1.

    Args:
        num_ranks: how many pipe ranks share the stages (default: each has one). "interleaved" puts stage s on rank
            s modulo `num_ranks`; all others need one rank per stage.
        delays: for "eager-1f1b-delayed", by how many microbatches the weight gradients of each stage lag behind, as
            `weight_delays` returns; by default s for stage s.

    Raises UnknownScheduleError for another name, InvalidScheduleError for counts below 1 or that do not match.
    """
    named = named_schedule(name)
    num_ranks = num_stages if num_ranks is None else num_ranks
    _check_counts(name, num_stages, num_microbatches, num_ranks)
    if named.warm_up is None:
        ranks = [_interleaved(rank, num_ranks, num_stages, num_microbatches) for rank in range(num_ranks)]
    else:
        ranks = [
            _one_stage(named.warm_up, named.delay, stage, num_stages, num_microbatches, delays)
            for stage in range(num_stages)
        ]
    return Schedule(name, num_stages, num_microbatches, tuple(map(tuple, ranks)))


def weight_delays(weights_us: Sequence[float], gradient_us: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """By how many microbatches to delay each stage's weight gradients to hide the communication at the end of a step.

    The last gradient that a stage sends back still has to pass all stages before it. Weight gradients that the stage
    computes meanwhile take no additional time if they are done before that communication is: the delays are the
    smallest that cover it (backward weight delaying, Zhuang et al., section 4).

    Args:
        weights_us: the time of one microbatch's weight gradients on each stage.
        gradient_us: the time to send a gradient from each stage to the previous one; 0 for the first.
    """
    delays, path_us = [], 0.0
    for weight_us, hop_us in zip(weights_us, gradient_us, strict=True):
        path_us += hop_us
        needed = math.ceil(path_us / weight_us) if weight_us > 0 else 0
        delays.append(min(needed, num_microbatches))
    return tuple(delays)


def _check_counts(name: str, num_stages: int, num_microbatches: int, num_ranks: int) -> None:
    if min(num_stages, num_microbatches, num_ranks) < 1:
        found = f"{num_stages} stages and {num_microbatches} microbatches on {num_ranks} pipe ranks"
        raise InvalidScheduleError(f"{name}: {found}: expected at least 1 of each")
    shares_ranks = NAMED_SCHEDULES[name].shares_ranks
    if shares_ranks and num_stages % num_ranks:
        raise InvalidScheduleError(
            f"{name}: {num_stages} stages on {num_ranks} pipe ranks: expected a multiple of {num_ranks} stages"
        )
    if not shares_ranks and num_stages != num_ranks:
        raise InvalidScheduleError(
            f"{name}: {num_stages} stages on {num_ranks} pipe ranks: expected one stage per rank; "
            f'for several stages on each rank there is "{INTERLEAVED}"'
        )


def _one_stage(
    warm_up: Count,
    delay: Count | None,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    delays: Sequence[int] | None,
) -> Iterator[Action]:
    forwards = warm_up(stage, num_stages, num_microbatches)
    if delay is None:
        return _alternate(stage, forwards, num_microbatches)
    lag = delay(stage, num_stages, num_microbatches) if delays is None else delays[stage]
    return _alternate_split(stage, forwards, lag, num_microbatches)


def _alternate(stage: int, warm_up: int, num_microbatches: int) -> Iterator[Action]:
    """`warm_up` forwards, then backwards and forwards alternately, then the remaining backwards."""
    forwards = iter([Action(stage, "F", microbatch) for microbatch in range(num_microbatches)])
    yield from islice(forwards, warm_up)
    for microbatch in range(num_microbatches):
        yield Action(stage, "B", microbatch)
        yield from islice(forwards, 1)


def _alternate_split(stage: int, warm_up: int, delay: int, num_microbatches: int) -> Iterator[Action]:
    """As `_alternate`, with I for backwards; each is followed by W of the microbatch that is `delay` before its own."""
    forwards = iter([Action(stage, "F", microbatch) for microbatch in range(num_microbatches)])
    yield from islice(forwards, warm_up)
    for microbatch in range(num_microbatches):
        yield Action(stage, "I", microbatch)
        if microbatch >= delay:
            yield Action(stage, "W", microbatch - delay)
        yield from islice(forwards, 1)
    for microbatch in range(max(num_microbatches - delay, 0), num_microbatches):
        yield Action(stage, "W", microbatch)


def _interleaved(rank: int, num_ranks: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """1F1B over all stages of a rank (Narayanan et al., Megatron-LM, section 2.2).

    Groups of microbatches, of as many as there are ranks or a few more, pass the first stages of all ranks, then the
    second ones, and so on.
    """
    own = range(rank, num_stages, num_ranks)
    groups = _even_groups(num_microbatches, max(1, num_microbatches // num_ranks))
    order = [(stage, microbatch) for group in groups for stage in own for microbatch in group]
    mirrored = {stage: num_stages - num_ranks + 2 * rank - stage for stage in own}
    forwards = iter([Action(stage, "F", microbatch) for stage, microbatch in order])
    largest = max(map(len, groups))
    yield from islice(forwards, 2 * (num_ranks - 1 - rank) + (len(own) - 1) * largest + 1)
    for stage, microbatch in order:
        yield Action(mirrored[stage], "B", microbatch)
        yield from islice(forwards, 1)


def _even_groups(count: int, num_groups: int) -> list[range]:
    """The numbers below `count`, in groups whose sizes differ by at most one."""
    bounds = [count * group // num_groups for group in range(num_groups + 1)]
    return [range(*bound) for bound in pairwise(bounds)]
