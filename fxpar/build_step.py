"""Assemble a step: this rank's compiled stage, the ways between stages, and the program that runs them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from fxpar.compiler import compile_stages, divide_stage, join_stages, localize_stage, lower_stage, plan_stages
from fxpar.config import ALL_STAGES, INDUCTOR, SLEEP, Options
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import cluster_of, memory_of, prices_of
from fxpar.costs.stage_times import estimate_costs, gather_costs
from fxpar.dump import Dump
from fxpar.environment import is_first_rank
from fxpar.errors import NoLossError
from fxpar.ir.capture import Capture, example
from fxpar.ir.random import RANDOM_STATE
from fxpar.ir.remat import Remat
from fxpar.ir.stage import PlannedStage, PortKind
from fxpar.ir.storage_options import storage_choices
from fxpar.lowering import lower as lowering_named
from fxpar.model.buffers import assign_buffers
from fxpar.model.distribution import Distribution, distribution_of
from fxpar.pass_log import PassLog
from fxpar.passes.decompose.batch_mixing import warn_of_batch_mixing
from fxpar.passes.stage_graphs import StageGraphs
from fxpar.passes.stages.pipeline_messages import pipeline_messages
from fxpar.resharding.pipeline import Pipeline, lookahead_on
from fxpar.resharding.strategies import SIGNAL
from fxpar.runtime.executor import Executor
from fxpar.runtime.input_check import input_check
from fxpar.runtime.loss import Loss
from fxpar.runtime.profile import profile_stage
from fxpar.runtime.results import result_specs
from fxpar.runtime.step import Step
from fxpar.runtime.wiring import connect
from fxpar.schedule import (
    MEMORY_HEADER,
    Costs,
    Program,
    Schedule,
    check_memory,
    check_programs,
    check_trains,
    few_microbatches_warning,
    forward_only,
    lower,
    peak_memory,
)
from fxpar.schedule.choose_schedule import check_placement, choose_schedule
from fxpar.world.agreement import check_agreement, check_collectives, of_all_ranks
from fxpar.world.lost_peers import warning_of_a_long_wait
from fxpar.world.mesh import Mesh

_ALL_RANKS_COMPILE = """all other ranks to compile the model, too, for one microbatch of these arguments:
{}
A rank that is called with arguments of other shapes may run a step that it has compiled before: then this rank and that
one wait for each other. Expected the same shapes on all ranks in every step (drop_last=True for uneven last batches)"""


def build_step(capture: Capture, options: Options, *, with_backward: bool) -> Step:
    """The callable that runs a whole step of the distributed model that `capture` belongs to.

    Raises:
        NoLossError: gradients are wanted, but the forward returns no scalar that requires grad.
        SharedBufferError: a stage uses a buffer that another one changes.
        PlanMismatchError: the ranks derived different plans.
        MemoryBudgetError: a rank would need more memory than there is.
        and what the passes raise.
    """
    distribution = distribution_of(capture.model)
    mesh, plan = distribution.mesh, distribution.final_plan
    if with_backward and capture.loss is None:
        raise NoLossError(capture.describe_results())
    loss = _loss(capture, capture.loss if with_backward else capture.first_scalar)
    _warn_of_meaningless_results(options)
    log = PassLog(Dump(options.dump, mesh.rank))
    stages = _planned(capture, distribution, log, dumping=options.dump is not None, with_backward=with_backward)
    assign_buffers(capture, stages, distribution)
    warn_of_batch_mixing([stage.joint for stage in stages], capture, distribution)
    pipeline = join_stages(stages, distribution, options.strategy, options.algorithm, log)
    costs = estimate_costs(stages, pipeline, mesh, distribution.placement)
    schedule = _schedule(distribution, options, costs, with_backward=with_backward)
    if with_backward and is_first_rank() and (warning := few_microbatches_warning(schedule, costs.edges)):
        warnings.warn(warning, stacklevel=2)
    with warning_of_a_long_wait(_ALL_RANKS_COMPILE.format(_arguments(capture, distribution))):
        check_agreement(_facts(distribution, capture, stages, pipeline, schedule, options))
    graphs, costs, programs = _divide(stages, pipeline, distribution, schedule, costs, options)
    model = GraphModel(mesh, prices_of(mesh))
    graphs = compile_stages(
        graphs,
        model,
        options.fuse,
        options.overlapping,
        log,
        gather_costs=of_all_ranks,
        # Where a fused op may have no kernel, or a slow one.
        tries_fused_ops=mesh.moves_in_groups and options.lowering != SLEEP,
    )
    check_collectives({name: started for each in graphs for name, started in each.started.items()})
    lowering = lowering_named(options.lowering, model.compute_us)
    own = [lower_stage(each, lowering) for each in graphs]
    if options.profile:
        costs = gather_costs(replace(costs, compute_us={stage.index: profile_stage(stage) for stage in own}))
        if with_backward:  # the order of forwards does not depend on times
            schedule = _schedule(distribution, options, costs, with_backward=with_backward)
            programs = _programs(schedule, stages, pipeline, mesh)
    peaks = peak_memory(programs, schedule, pipeline.edges, costs.memory)
    check_memory(peaks, _budget(options, mesh))
    program = programs[mesh.coordinate["pipe"]]
    log.dump.text("schedule", schedule)
    log.dump.text("program", program)
    log.dump.text("memory", "\n".join(map(str, (MEMORY_HEADER, *peaks))))
    if with_backward:  # or an evaluation would write over what its training costs
        log.dump.json("costs", replace(costs, num_microbatches=plan.microbatches).to_json())
    timeout = timedelta(seconds=options.transfer_timeout_s)
    connections = connect(pipeline.reshards, own, mesh, plan.microbatches, timeout, answered=loss is None)
    executor = Executor(
        mesh,
        program,
        own,
        connections,
        plan.microbatches,
        {port.name: dim for port, dim in capture.batch_dims.items()} | {RANDOM_STATE.name: 0},
        loss,
    )
    check_collectives(executor.gradient_sums)
    results = result_specs(capture, stages[-1].border)
    distribution.num_compiles += 1
    return Step(
        capture,
        loss,
        distribution,
        executor,
        results,
        options.timeline,
        with_backward=with_backward,
        results_on_all_stages=options.results == ALL_STAGES,
        check_inputs=input_check(capture, distribution) if options.check_inputs else None,
    )


def _warn_of_meaningless_results(options: Options) -> None:
    given = {"strategy": (options.strategy, SIGNAL), "lowering": (options.lowering, SLEEP)}
    for name, (chosen, meaningless) in given.items():
        if chosen == meaningless and is_first_rank():
            warnings.warn(f'with {name}="{chosen}" all results are meaningless: only their times are not', stacklevel=2)


def _loss(capture: Capture, position: int | None) -> Loss | None:
    return None if position is None else Loss(position, example(capture.results[position]).dtype)


def _planned(
    capture: Capture, distribution: Distribution, log: PassLog, *, dumping: bool, with_backward: bool
) -> tuple[PlannedStage, ...]:
    """The stages as `distribute` planned them for the same program, unless a dump wants to see every pass."""
    known = distribution.planned.get(capture.signature())
    if known is not None and with_backward and not dumping:
        return known
    boundaries = distribution.final_plan.stages
    return plan_stages(capture, distribution, boundaries, with_backward=with_backward, log=log)


def _schedule(distribution: Distribution, options: Options, costs: Costs, *, with_backward: bool) -> Schedule:
    plan = distribution.final_plan
    schedule = choose_schedule(options.schedule or plan.schedule, costs, distribution.mesh.pipe, plan.microbatches)
    check_placement(schedule, distribution.placement)
    if with_backward:
        check_trains(schedule)
        return schedule
    return forward_only(schedule)


def _budget(options: Options, mesh: Mesh) -> float:
    return options.memory_bytes or memory_of(mesh.device_type)


def _divide(
    stages: Sequence[PlannedStage],
    pipeline: Pipeline,
    distribution: Distribution,
    schedule: Schedule,
    costs: Costs,
    options: Options,
) -> tuple[list[StageGraphs], Costs, tuple[Program, ...]]:
    """The graphs of this rank's stages, what all stages cost now, and all programs; a collective of all ranks.

    Of the ways to handle what is stored in shards that the options leave open, it takes the first that fits into
    memory, else the last.
    """
    mesh, num_microbatches = distribution.mesh, distribution.final_plan.microbatches
    programs = _programs(schedule, stages, pipeline, mesh)
    local = {
        index: localize_stage(stages[index], distribution) for index in schedule.stages_of(mesh.coordinate["pipe"])
    }
    graphs: list[StageGraphs] = []
    remat = Remat(options.remat, options.gathered_bytes)
    for storage in storage_choices(options.gather_weights, options.reduce_gradients, num_microbatches, mesh.z):
        graphs = [
            divide_stage(
                stages[index],
                graph,
                distribution,
                schedule,
                storage,
                remat,
                options.overlapping,
                fuses=options.lowering == INDUCTOR,
            )
            for index, graph in local.items()
        ]
        memory = {each.index: each.memory for each in graphs}
        costs = gather_costs(replace(costs, memory=memory))
        peaks = peak_memory(programs, schedule, pipeline.edges, costs.memory)
        if max(peak.peak_bytes for peak in peaks) <= _budget(options, mesh):
            break
    return graphs, costs, programs


def _programs(
    schedule: Schedule, stages: Sequence[PlannedStage], pipeline: Pipeline, mesh: Mesh
) -> tuple[Program, ...]:
    programs = lower(schedule, pipeline.edges, lookahead_on(mesh))
    messages = pipeline_messages(stages, [reshard.crossing for reshard in pipeline.reshards])
    check_programs(programs, schedule, pipeline.edges, messages)
    return programs


def _facts(
    distribution: Distribution,
    capture: Capture,
    stages: Sequence[PlannedStage],
    pipeline: Pipeline,
    schedule: Schedule,
    options: Options,
) -> dict[str, str]:
    """What every rank must have derived alike, by name."""
    return {
        "the mesh": str(distribution.mesh),
        "the hosts of ranks": str(distribution.mesh.hosts),
        "the cluster": str(cluster_of(distribution.mesh)),
        "the arguments of the forward": _arguments(capture, distribution),
        "the captured forward": capture.signature(),
        "the plan": str(distribution.final_plan),
        "the layouts between stages": "\n".join(str(stage.border) for stage in stages),
        "what moves between stages, and how": "\n".join(
            f"{reshard.crossing} {reshard.plan.digest}" for reshard in pipeline.reshards
        ),
        "the schedule": str(schedule),
        "the options of results": f"{options.results} {options.check_inputs}",
        "the options of memory": f"{options.memory_bytes} {options.gather_weights} {options.reduce_gradients} "
        f"{options.remat} {options.gathered_bytes}",
    }


def _arguments(capture: Capture, distribution: Distribution) -> str:
    """The tensors that the forward is called with, by name, and what one microbatch takes of them."""
    entering = [(port, node) for node, port in capture.sources.items() if port.kind is PortKind.INPUT]
    return "\n".join(
        f"{distribution.argument_name(int(port.name))}: {example(node).dtype} {tuple(example(node).shape)}"
        for port, node in entering
    )
