"""Derive what is equal on all ranks: the stages, the transfers between them, their costs, and the schedule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from fxpar.build.planned_stages import planned_stages
from fxpar.build.task import Task
from fxpar.compiler import join_stages, plan_stages
from fxpar.costs.stage_times import estimate_costs
from fxpar.environment import checks_passes, is_first_rank
from fxpar.ir.stage import PlannedStage
from fxpar.model.buffers import assign_buffers
from fxpar.passes.decompose.batch_mixing import warn_of_batch_mixing
from fxpar.passes.stages.pipeline_messages import pipeline_messages
from fxpar.resharding.pipeline import Pipeline, lookahead_on
from fxpar.schedule import (
    Costs,
    Program,
    RankMemory,
    Schedule,
    check_programs,
    few_microbatches_warning,
    forward_only,
    lower,
    peak_memory,
)
from fxpar.world.agreement import check_agreement
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every rank derives identically: the stages, the transfers between them, the schedule, and their costs."""

    stages: Sequence[PlannedStage]
    pipeline: Pipeline
    schedule: Schedule
    costs: Costs
    programs: tuple[Program, ...] = ()
    """Of every pipe rank; empty until the ranks have agreed on the schedule."""

    def with_programs(self, mesh: Mesh) -> StepPlan:
        """The same with programs, which are checked to be free of deadlocks."""
        programs = lower(self.schedule, self.pipeline.edges, lookahead_on(mesh))
        messages = pipeline_messages(self.stages, [reshard.crossing for reshard in self.pipeline.reshards])
        check_programs(programs, self.schedule, self.pipeline.edges, messages)
        return replace(self, programs=programs)

    def without_backward(self, mesh: Mesh) -> StepPlan:
        """The plan of an evaluation by the forward graphs of this training step."""
        memory = {stage: figures.without_backward for stage, figures in self.costs.memory.items()}
        costs = replace(self.costs, memory=memory)
        return replace(self, schedule=forward_only(self.schedule), costs=costs).with_programs(mesh)

    @property
    def peaks(self) -> tuple[RankMemory, ...]:
        """The peak memory of each pipe rank."""
        return peak_memory(self.programs, self.schedule, self.pipeline.edges, self.costs.memory)


def plan_step(task: Task) -> StepPlan:
    """The plan that must be equal on all ranks, which compare digests of it; a collective of all ranks.

    Raises:
        SharedBufferError: a stage uses a buffer that another one changes.
        PlanMismatchError: the ranks derived different plans.
        and what the passes raise.
    """
    capture, options, distribution = task.capture, task.options, task.distribution
    stages = _stages(task)
    assign_buffers(capture, stages, distribution)
    warn_of_batch_mixing([stage.joint for stage in stages], capture, distribution)
    pipeline = join_stages(stages, distribution, options.strategy, options.algorithm, task.log)
    costs = estimate_costs(stages, pipeline, task.mesh, distribution.placement)
    schedule = task.schedule(costs)
    if task.with_backward and distribution.is_of_whole_batch(capture) and is_first_rank():
        _warn_of_few_microbatches(schedule, costs)
    plan = StepPlan(stages, pipeline, schedule, costs)
    check_agreement(_derived_facts(plan))
    return plan


def _warn_of_few_microbatches(schedule: Schedule, costs: Costs) -> None:
    if (warning := few_microbatches_warning(schedule, costs.edges)) is not None:
        warnings.warn(warning, stacklevel=3)


def _stages(task: Task) -> tuple[PlannedStage, ...]:
    """The stages that `distribute` planned for the same program; planned anew if a dump has to show how.

    The first rank shows it for all, which would show the same: checks prove that, by letting every rank plan.
    """
    capture, distribution, with_backward = task.capture, task.distribution, task.with_backward
    boundaries = distribution.final_plan.stages
    known = distribution.planned.get(capture.signature) if with_backward else None
    if task.log.dump.is_read and (task.mesh.rank == 0 or checks_passes()):
        # With the parameters of the plan given, other layouts of other values could be found to be as good.
        with distribution.before_plan() if known else nullcontext():
            return plan_stages(capture, distribution, boundaries, with_backward=with_backward, log=task.log)
    return known() if known else planned_stages(capture, distribution, boundaries, with_backward=with_backward)


def _derived_facts(plan: StepPlan) -> dict[str, str]:
    """What must be equal on all ranks, by the name under which an error reports it."""
    crossings = (f"{reshard.crossing} {reshard.plan.digest}" for reshard in plan.pipeline.reshards)
    return {
        "the layouts between stages": "\n".join(str(stage.border) for stage in plan.stages),
        "the transfers between stages": "\n".join(crossings),
        "the schedule": str(plan.schedule),
    }
