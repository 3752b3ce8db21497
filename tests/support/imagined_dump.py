"""Dumps of steps that never run: one process makes the graphs of every stage on fake process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fxpar.build.step_facts import rank_facts, step_facts
from fxpar.build.step_plan import StepPlan
from fxpar.compiler import compile_stages, divide_stage, join_stages, localize_stage, plan_stages
from fxpar.config import Options
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.costs.stage_times import estimate_costs
from fxpar.dump import Dump
from fxpar.hardware.cluster import Cluster
from fxpar.ir.hints import Spec
from fxpar.ir.plan import Plan
from fxpar.ir.storage_options import AUTO, storage_choices
from fxpar.make_plan import parameters_of
from fxpar.model.distribution import Distribution
from fxpar.model.logical import install
from fxpar.pass_log import PassLog
from fxpar.passes.stage_graphs import StageGraphs
from fxpar.passes.stages.balance_stages import balance_stages
from fxpar.planner.imagined_mesh import imagined_mesh, imagined_world
from fxpar.report.facts import RANK_FACTS, STEP_FACTS, to_json
from fxpar.schedule.choose_schedule import choose_placement, choose_schedule
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Imagined:
    """How a model is distributed; `sizes` are those of the mesh, with one stage per pipe rank."""

    sizes: Mapping[str, int]
    cluster: Cluster
    microbatches: int = 4
    schedule: str = "1f1b"
    layouts: Mapping[str, Spec] | None = None


def dump_imagined(
    model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any], how: Imagined, folder: Path, *, texts: bool = False
) -> None:
    """Dump the facts and costs of a step as its ranks would, with `texts` also the graphs of the passes.

    Args:
        inputs: those of one batch shard, for all microbatches.
    """
    with imagined_world(math.prod(how.sizes.values())):
        mesh = imagined_mesh(how.sizes, how.cluster)
        distribution = Distribution.of(model, mesh, how.layouts, how.microbatches)
        install(distribution)
        log = PassLog(Dump(folder if texts else None, 0))
        plan = _plan(distribution, inputs, how, log)
        graphs = {
            stage: _graphs(distribution, plan, stage, log if stage == 0 else None, folder if texts else None)
            for stage in range(mesh.pipe)
        }
        memory = {stage: each.memory for stage, each in graphs.items()}
        plan = replace(plan, costs=replace(plan.costs, memory=memory, num_microbatches=how.microbatches))
        _dump_facts(distribution, plan, graphs, folder, mesh)


def _plan(
    distribution: Distribution, inputs: Sequence[Any] | Mapping[str, Any], how: Imagined, log: PassLog
) -> StepPlan:
    mesh, options = distribution.mesh, Options()
    distribution.placement = choose_placement(how.schedule, mesh.pipe, mesh.pipe)
    capture = distribution.tracer.capture(mesh.device_type, inputs)
    boundaries = balance_stages(capture, mesh.pipe, prices_of(mesh))
    stages = plan_stages(capture, distribution, boundaries, log=log)
    parameters = parameters_of(stages, distribution)
    distribution.plan = Plan(boundaries, mesh.sizes, how.microbatches, how.schedule, parameters, distribution.placement)
    pipeline = join_stages(stages, distribution, options.strategy, options.algorithm, log)
    costs = estimate_costs(stages, pipeline, mesh, distribution.placement)
    schedule = choose_schedule(how.schedule, costs, mesh.pipe, how.microbatches)
    return StepPlan(stages, pipeline, schedule, costs)


def _graphs(
    distribution: Distribution, plan: StepPlan, stage: int, log: PassLog | None, folder: Path | None
) -> StageGraphs:
    """The graphs of a stage on the first of its ranks."""
    mesh, overlap = distribution.mesh, Options().overlapping
    distribution.mesh = own = replace(mesh, rank=mesh.rank_at({"pipe": stage}))
    storage = storage_choices(AUTO, AUTO, distribution.microbatches, mesh.z)[0]
    local = localize_stage(plan.stages[stage], distribution)
    graphs = divide_stage(plan.stages[stage], local, distribution, plan.schedule, storage, overlap=overlap)
    log = log or PassLog(Dump(folder, own.rank))
    (compiled,) = compile_stages([graphs], GraphModel(own, prices_of(own)), True, overlap, log)
    distribution.mesh = mesh
    return compiled


def _dump_facts(
    distribution: Distribution, plan: StepPlan, graphs: Mapping[int, StageGraphs], folder: Path, mesh: Mesh
) -> None:
    """What each rank writes; ranks that share a stage write the same."""
    first, model = Dump(folder, 0), GraphModel(mesh, prices_of(mesh))
    first.json("costs", plan.costs.to_json())
    first.json(STEP_FACTS, to_json(step_facts(distribution, plan, math.inf)))
    of_stages = {stage: to_json(rank_facts([each], model, mesh)) for stage, each in graphs.items()}
    for rank in range(mesh.num_ranks):
        Dump(folder, rank).json(RANK_FACTS, of_stages[mesh.coordinate_of(rank)["pipe"]])
