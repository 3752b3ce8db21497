"""Where the time of a predicted step goes, on the average of all pipe ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from fxpar.analysis.critical_path import Dependencies
from fxpar.analysis.dumped_step import DumpedStep
from fxpar.report.facts import ONCE, StageFacts
from fxpar.schedule import Kind, Timeline

PIPE = "pipe"


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of the step's time: a name for programs, and one for people."""

    name: str
    label: str
    time_us: float


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Microseconds of the average pipe rank; they add up to `step_us`.

    compute_us: useful computation. replicated_us: computation that sharding would save at best.
    exposed_us: by axis, in which ranks wait for communication; "pipe" is that between stages.
    bubble_us: the rest, in which the schedule has nothing for a rank to do.
    """

    step_us: float
    compute_us: float
    replicated_us: float
    exposed_us: Mapping[str, float]
    bubble_us: float

    @property
    def parts(self) -> list[StepPart]:
        """All parts, from what has to be done to what is lost."""
        exposed = [
            StepPart(f"exposed_{axis}", f"exposed {_communication(axis)}", time_us)
            for axis, time_us in self.exposed_us.items()
        ]
        return [
            StepPart("compute", "computation", self.compute_us),
            StepPart("replicated", "replicated computation", self.replicated_us),
            *exposed,
            StepPart("bubble", "bubble", self.bubble_us),
        ]

    def of_step(self, time_us: float) -> float:
        """A time as a share of the step."""
        return time_us / self.step_us if self.step_us else 0.0


def _communication(axis: str) -> str:
    return "transfers between stages" if axis == PIPE else f"collectives over {axis}"


def time_shares(step: DumpedStep) -> TimeShares:
    """The shares of the predicted step."""
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
    return TimeShares(step.step_us, computed_us - replicated_us, replicated_us, mean, bubble_us)


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
