"""Derive the graphs that this rank runs, divided as memory allows, with collectives fused and ordered."""

from __future__ import annotations

from dataclasses import replace

from fxpar.build.step_plan import StepPlan
from fxpar.build.task import Task
from fxpar.compiler import compile_stages, divide_stage, localize_stage
from fxpar.config import INDUCTOR, SLEEP, TENSORRT
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.stage_times import gather_costs
from fxpar.ir.remat import Remat
from fxpar.ir.storage_options import storage_choices
from fxpar.passes.stage_graphs import StageGraphs
from fxpar.world.agreement import check_collectives, of_all_ranks


def derive_graphs(task: Task, plan: StepPlan, model: GraphModel) -> tuple[list[StageGraphs], StepPlan]:
    """The graphs of this rank's stages, and the plan with programs and memory; a collective of all ranks.

    Args:
        model: estimates the times that decide which collectives are fused.

    Raises:
        PlanMismatchError: ranks would start collectives in different orders.
        and what the passes raise.
    """
    graphs, plan = _divide(task, plan)
    # Over NCCL, that is on GPUs, a fused op may have no kernel, or a slow one.
    tries = task.mesh.moves_in_groups and task.options.lowering != SLEEP
    overlap, fuse = task.options.overlapping, task.options.fuse
    graphs = compile_stages(graphs, model, fuse, overlap, task.log, gather_costs=of_all_ranks, tries_fused_ops=tries)
    check_collectives({name: started for each in graphs for name, started in each.started.items()})
    return graphs, plan


def _divide(task: Task, plan: StepPlan) -> tuple[list[StageGraphs], StepPlan]:
    """The graphs of this rank's stages, and the plan with the memory of all stages; a collective of all ranks.

    Gathers and reductions over z may run per microbatch or once per step. Of the choices that the options leave open,
    this takes the first whose predicted memory fits on every rank, otherwise the last.
    """
    options, mesh, distribution = task.options, task.mesh, task.distribution
    plan, schedule = plan.with_programs(mesh), plan.schedule
    own = [plan.stages[index] for index in schedule.stages_of(mesh.coordinate["pipe"])]
    local = [localize_stage(stage, distribution) for stage in own]
    remat = Remat(options.remat, options.gathered_bytes)
    overlap, fuses = options.overlapping, options.lowering in (INDUCTOR, TENSORRT)
    graphs: list[StageGraphs] = []
    for storage in storage_choices(options.gather_weights, options.reduce_gradients, task.microbatches, mesh.z):
        graphs = [
            divide_stage(stage, graph, distribution, schedule, storage, remat, overlap, fuses=fuses)
            for stage, graph in zip(own, local, strict=True)
        ]
        memory = {each.index: each.memory for each in graphs}
        plan = replace(plan, costs=gather_costs(replace(plan.costs, memory=memory)))
        if max(peak.peak_bytes for peak in plan.peaks) <= task.memory_budget:
            break
    return graphs, plan
