"""A step as its ranks have dumped it: facts, costs, programs, and the timelines that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

from fxpar.analysis.critical_path import Dependencies
from fxpar.errors import NoFactsError
from fxpar.report.facts import RANK_FACTS, STEP_FACTS, RankFacts, StageFacts, StepFacts, from_json
from fxpar.schedule import ActionMemory, Costs, Kind, Program, Schedule, Timeline, lower, memory_by_action, simulate


@dataclass(frozen=True)
class DumpedStep:
    """The facts of all ranks, as far as they are known, and the latest measured step.

    stages: by number, on the rank that takes longest for it.
    recorded: what the costs file has; times of actions in it may be coarse estimates, see `costs`.
    """

    facts: StepFacts
    stages: Mapping[int, StageFacts]
    recorded: Costs
    measured: Timeline | None = None

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.parse(self.facts.schedule, self.facts.schedule_name)

    @cached_property
    def costs(self) -> Costs:
        """With the times of actions by their graphs, collectives included, unless they were measured."""
        if self.facts.profiled:
            return self.recorded
        of_graphs: dict[int, Mapping[Kind, float]] = {
            stage: {cast(Kind, kind): action.total_us for kind, action in facts.actions.items()}
            for stage, facts in self.stages.items()
        }
        return replace(self.recorded, compute_us={**self.recorded.compute_us, **of_graphs})

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return lower(self.schedule, self.costs.edges)

    @cached_property
    def simulated(self) -> Timeline:
        """The predicted step, without what runs once per step."""
        return simulate(self.programs, self.costs)

    @cached_property
    def dependencies(self) -> Dependencies:
        """What the computations of the predicted step wait for."""
        return Dependencies(self.simulated)

    @cached_property
    def memory(self) -> tuple[tuple[ActionMemory, ...], ...]:
        """By pipe rank; empty where the memory of some stage is not known."""
        if len(self.costs.memory) < self.costs.num_stages:
            return ()
        return memory_by_action(self.programs, self.schedule, self.costs.edges, self.costs.memory)

    def once_us(self, rank: int) -> float:
        """What a pipe rank runs once per step: gathers of weights, and reductions of gradients."""
        return sum(self.stages[stage].once_us for stage in self.schedule.stages_of(rank) if stage in self.stages)

    @cached_property
    def step_us(self) -> float:
        """The predicted time of the step: until the last rank has reduced its gradients."""
        timeline = self.simulated
        ends = {rank: max(span.end_us for span in timeline.spans if span.rank == rank) for rank in timeline.ranks}
        return max(end_us + self.once_us(rank) for rank, end_us in ends.items())


def read_dump(folder: Path, measured: Sequence[Path] | None = None) -> DumpedStep:
    """The step whose ranks have dumped into `folder`.

    Args:
        measured: traces of a recorded step, or folders of them; by default (None) those of the option `timeline`, else
            those below the folder.

    Raises:
        NoFactsError: the first rank has written no facts of a training step there, or another release has.
        InvalidCostsError, InvalidTimelineError: other files are damaged.
    """
    files = sorted(folder.glob(f"rank0/*_{STEP_FACTS}.json"))
    if not files:
        raise NoFactsError(str(folder), f"no rank0/*_{STEP_FACTS}.json")
    facts = _read(StepFacts, files[-1])
    # Not those of an earlier compile with more ranks.
    paths = [path for rank in range(len(facts.hosts)) for path in folder.glob(f"rank{rank}/*_{RANK_FACTS}.json")]
    ranks = [_read(RankFacts, path) for path in paths]
    costs = Costs.load(next(iter(folder.glob("rank0/*_costs.json")), folder))
    return DumpedStep(facts, _slowest(ranks), costs, _measured(folder, facts, measured))


FactsT = TypeVar("FactsT", StepFacts, RankFacts)


def _read(kind: type[FactsT], path: Path) -> FactsT:
    try:
        return from_json(kind, path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoFactsError(str(path), str(error)) from None


def _slowest(ranks: Iterable[RankFacts]) -> dict[int, StageFacts]:
    """Each stage on the rank that takes longest for it; of several, the first of `ranks`."""
    found: dict[int, StageFacts] = {}
    for rank in ranks:
        for stage in rank.stages:
            if stage.stage not in found or _total_us(stage) > _total_us(found[stage.stage]):
                found[stage.stage] = stage
    return dict(sorted(found.items()))


def _total_us(stage: StageFacts) -> float:
    return stage.once_us + sum(action.total_us for action in stage.actions.values())


def _measured(folder: Path, facts: StepFacts, given: Sequence[Path] | None) -> Timeline | None:
    if given is not None:
        return Timeline.merge(map(Timeline.load, given)).from_start() if given else None
    recorded = [Path(facts.timeline)] if facts.timeline is not None else []
    for place in (*recorded, folder):
        if any(place.rglob("*timeline*.json")):
            return Timeline.load(place).from_start()
    return None
