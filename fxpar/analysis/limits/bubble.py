"""The bubble: ranks wait for the first microbatches to arrive, and for the last to come back."""

from __future__ import annotations

from collections.abc import Iterator

from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.limits.limit import Limit
from fxpar.analysis.limits.words import counted, percent, time_text
from fxpar.analysis.predicted_parts import bubble_share, graph_us, runs_of
from fxpar.errors import FxparError
from fxpar.report.step_parts import StepParts
from fxpar.schedule import NAMED_SCHEDULES, build_schedule, lower, named_schedule, simulate

_UNEVEN = 1.2
"""A stage that takes this many times the mean of all delays the others."""

_MOST_SIMULATED = 10_000
"""Forwards of a step that is simulated for a proposal: more would take seconds."""


def bubble(step: DumpedStep, parts: StepParts) -> Iterator[Limit]:
    """The bubble, if there are several pipe ranks; with the share that more microbatches would leave."""
    num_ranks, microbatches = len(step.schedule.ranks), step.facts.microbatches
    if num_ranks == 1:
        return
    share = parts.share(parts.bubble_us)
    finding = (
        f"In {percent(share)} of the step, {time_text(parts.bubble_us)} of {time_text(parts.total_us)}, the average "
        f"rank has nothing to do: {step.facts.schedule_name} runs {counted(microbatches, 'microbatch')} on "
        f"{num_ranks} pipe ranks.{_uneven_stages(step)}"
    )
    yield Limit("bubble", "Pipeline bubble", share, finding, _advice(step))


def _uneven_stages(step: DumpedStep) -> str:
    """A sentence on the slowest stage, if it delays the others."""
    times = [
        sum(runs * graph_us(step, stage, graph) for graph, runs in runs_of(step, stage).items())
        for stage in range(step.costs.num_stages)
    ]
    mean_us = sum(times) / len(times)
    if max(times) < _UNEVEN * mean_us:
        return ""
    return f" Stages are uneven: stage {times.index(max(times))} takes {max(times) / mean_us:.1f} times the mean."


def _advice(step: DumpedStep) -> str:
    predicted = [f"{count} would leave a bubble of {percent(share)}" for count, share in _with_more_microbatches(step)]
    fills_bubble = step.facts.schedule_name.startswith("zb")
    others = "use fewer pipe ranks" + ("" if fills_bubble else ", or a schedule with a smaller bubble, such as zb-h1")
    if not predicted:
        return f"Raise `microbatches`, {others}."
    return f"Raise `microbatches`: {' and '.join(predicted)}. Or {others}."


def _with_more_microbatches(step: DumpedStep) -> Iterator[tuple[int, float]]:
    """The bubble of the same schedule with two and four times as many microbatches; nothing for users' own."""
    name, costs = step.facts.schedule_name, step.costs
    if name not in NAMED_SCHEDULES:
        return
    for count in (2 * step.facts.microbatches, 4 * step.facts.microbatches):
        if count * costs.num_stages > _MOST_SIMULATED:
            return
        try:
            delays = costs.weight_delays(count) if named_schedule(name).delays_by_costs else None
            schedule = build_schedule(name, costs.num_stages, count, num_ranks=costs.num_ranks, delays=delays)
            yield count, bubble_share(simulate(lower(schedule, costs.edges), costs))
        except FxparError:
            return  # such as a number of microbatches that the schedule cannot have
