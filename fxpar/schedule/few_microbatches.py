"""Warn about the bubble of a step with fewer microbatches than pipe ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpar.schedule.action import Kind
from fxpar.schedule.costs import uniform_costs
from fxpar.schedule.program import lower
from fxpar.schedule.schedule import Schedule
from fxpar.schedule.simulator import simulate
from fxpar.schedule.transfer import Edge

_TICKS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Relative times of computations, as is usual for matrix products."""


def few_microbatches_warning(schedule: Schedule, edges: Sequence[Edge]) -> str | None:
    """The warning for fewer microbatches than pipe ranks, which are then never busy all at once; None otherwise.

    Raises:
        InvalidScheduleError: there is a deadlock.
    """
    num_ranks = len(schedule.ranks)
    if schedule.num_microbatches >= num_ranks:
        return None
    ticks = {kind: [time] * schedule.num_stages for kind, time in _TICKS.items()}
    timeline = simulate(lower(schedule, edges), uniform_costs(schedule.placement, edges, ticks))
    return (
        f"{schedule.name}: {schedule.num_microbatches} microbatches for {num_ranks} pipe ranks: at least "
        f"{timeline.bubble_share:.0%} of the step is bubble, in which ranks do nothing; with {num_ranks} microbatches "
        "or more all of them work at once"
    )
