"""Where the time of a predicted step goes, on the average of all pipe ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import cast

from fxpar.analysis.critical_path import Dependencies
from fxpar.analysis.dumped_step import DumpedStep
from fxpar.report.facts import ONCE, StageFacts
from fxpar.report.step_parts import PIPE, StepParts
from fxpar.schedule import Kind, Timeline


def predicted_parts(step: DumpedStep) -> StepParts:
    """The parts of the predicted step on the average pipe rank; the bubble is what remains."""
    num_ranks = len(step.schedule.ranks)
    exposed: defaultdict[str, float] = defaultdict(float)
    replicated_us = busy_us = 0.0
    for stage in range(step.costs.num_stages):
        for graph, runs in runs_of(step, stage).items():
            busy_us += runs * graph_us(step, stage, graph)
            for axis, waited_us in waits_us(step, stage, graph).items():
                exposed[axis] += runs * waited_us
        if stage in step.stages:
            replicated_us += step.facts.microbatches * sum(each.wasted_us for each in step.stages[stage].replicated)
    computed_us = (busy_us - sum(exposed.values())) / num_ranks
    replicated_us = min(replicated_us / num_ranks, computed_us)
    exposed[PIPE] += sum(each.time_us for each in step.dependencies.exposed())
    mean = {axis: time_us / num_ranks for axis, time_us in exposed.items() if time_us}
    bubble_us = max(0.0, step.step_us - computed_us - sum(mean.values()))
    return StepParts(computed_us - replicated_us, mean, bubble_us, replicated_us)


def bubble_share(timeline: Timeline) -> float:
    """The share of all ranks' time in which they neither compute nor wait for communication."""
    exposed_us = sum(each.time_us for each in Dependencies(timeline).exposed())
    return timeline.bubble_share - exposed_us / (timeline.makespan_us * len(timeline.ranks))


def runs_of(step: DumpedStep, stage: int) -> dict[str, int]:
    """How often each graph of a stage runs in a step, by the kind of action; what runs once is `ONCE`."""
    actions = step.schedule.ranks[step.schedule.placement[stage]]
    return {**Counter(action.kind for action in actions if action.stage == stage), ONCE: 1}


def graph_us(step: DumpedStep, stage: int, graph: str) -> float:
    """The time of one run of a graph, collectives included."""
    if graph != ONCE:
        return step.costs.action_us(stage, cast(Kind, graph))
    return step.stages[stage].once_us if stage in step.stages else 0.0


def waits_us(step: DumpedStep, stage: int, graph: str) -> dict[str, float]:
    """By axis, how long one run of a graph waits for collectives.

    These are estimates. Where the time of the graph was measured, they are in proportion.
    """
    if stage not in step.stages:
        return {}
    waited: defaultdict[str, float] = defaultdict(float)
    for each in step.stages[stage].collectives:
        if each.graph == graph:
            waited[each.axis] += each.exposed_us
    estimated_us = _estimated_us(step.stages[stage], graph, sum(waited.values()))
    factor = graph_us(step, stage, graph) / estimated_us if estimated_us else 0.0
    return {axis: factor * time_us for axis, time_us in waited.items()}


def _estimated_us(stage: StageFacts, graph: str, waited_us: float) -> float:
    """The estimated time of a graph; what runs once per step only communicates."""
    return waited_us if graph == ONCE else stage.actions[graph].total_us
