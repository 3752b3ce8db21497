"""Assemble a step: the compiled stages of this rank, the transfers between stages, the schedule and its programs."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.agreement import check_agreement
from fxpar.capture import Capture
from fxpar.compiler import PlannedStage, compile_stage, plan_stages
from fxpar.config import Options
from fxpar.model.distribution import Distribution, distribution_of
from fxpar.dump import Dump
from fxpar.errors import NoLossError
from fxpar.lowering import lower as lowering_named
from fxpar.runtime.executor import Executor
from fxpar.runtime.step import Step
from fxpar.schedule import Edge, Schedule, build_schedule, check_programs, forward_only, lower
from fxpar.stage import PortKind


def build_step(capture: Capture, options: Options, *, with_backward: bool) -> Step:
    """The callable that runs a whole step of the distributed model that `capture` belongs to.

    Raises:
        NoLossError: gradients are wanted, but the forward returns no scalar that requires grad.
        PlanMismatchError: the ranks derived different plans.
        and what the passes raise.
    """
    distribution = distribution_of(capture.model)
    if with_backward and capture.loss is None:
        raise NoLossError(capture.describe_results())
    dump = Dump(options.dump, distribution.mesh.rank)
    plan = distribution.final_plan
    stages = plan_stages(capture, distribution, plan.stages, with_backward=with_backward, dump=dump)
    edges = stage_edges(stages)
    schedule = _schedule(distribution, with_backward)
    programs = lower(schedule, edges)
    check_programs(programs, schedule, edges)
    check_agreement(distribution, stages, schedule)
    pipe = distribution.mesh.coordinate["pipe"]
    stage = compile_stage(stages[pipe], distribution, lowering_named(options.lowering), dump)
    dump.text("schedule", str(schedule))
    dump.text("program", str(programs[pipe]))
    executor = Executor(...)
    return Step(capture, distribution, executor)


def _schedule(distribution: Distribution, with_backward: bool) -> Schedule:
    plan = distribution.final_plan
    schedule = build_schedule(plan.schedule, distribution.mesh.pipe, plan.microbatches)
    return schedule if with_backward else forward_only(schedule)


def stage_edges(stages: Sequence[PlannedStage]) -> tuple[Edge, ...]:
    """Every value that some stage makes and later ones use."""
    edges = []
    for source in stages:
        for port in source.joint.outputs:
            if port.kind is not PortKind.EDGE:
                continue
            readers = [stage.joint for stage in stages if port in stage.joint.inputs]
            differentiable = any(port in reader.gradients for reader in readers)
            edges.append(Edge(port.name, source.joint.index, tuple(r.index for r in readers), differentiable))
    return tuple(edges)
