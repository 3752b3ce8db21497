"""Build a step: this rank's compiled stages, their transports to other stages, and the program that runs them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from fxpar.ir.stage import CompiledStage, PlannedStage, PortKind
from fxpar.ir.storage_options import storage_choices
from fxpar.lowering import lower as lowering_named
from fxpar.lowering.joint_compilation import joint_compilation
from fxpar.lowering.vector_isa import find_vector_isa
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
    RankMemory,
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
    """The callable that runs a whole step of the distributed model that `capture` is of; a collective of all ranks.

    Raises:
        NoLossError: gradients are wanted, but the forward returns no scalar that requires grad.
        SharedBufferError: a stage uses a buffer that another one changes.
        PlanMismatchError: the ranks derived different plans.
        MemoryBudgetError: the predicted memory of a rank exceeds its budget.
        and what the passes raise.
    """
    distribution = distribution_of(capture.model)
    if with_backward and capture.loss is None:
        raise NoLossError(capture.describe_results())
    _warn_of_meaningless_results(options)
    if options.lowering == INDUCTOR and distribution.mesh.device_type == "cpu":
        find_vector_isa()  # while the passes run
    log = PassLog(Dump(options.dump, distribution.mesh.rank))
    task = _Task(capture, options, distribution, log, with_backward)
    planned = _plan(task)
    own, program = _compile(task, planned)
    executor = _connect(task, planned, own, program)
    distribution.num_compiles += 1
    return Step(
        capture,
        task.loss,
        distribution,
        executor,
        result_specs(capture, planned.stages[-1].border),
        options.timeline,
        with_backward=with_backward,
        results_on_all_stages=options.results == ALL_STAGES,
        check_inputs=input_check(capture, distribution) if options.check_inputs else None,
    )


@dataclass(frozen=True, slots=True)
class _Task:
    """The input of every part of the build."""

    capture: Capture
    options: Options
    distribution: Distribution
    log: PassLog
    with_backward: bool

    @property
    def mesh(self) -> Mesh:
        return self.distribution.mesh

    @property
    def loss(self) -> Loss | None:
        """Position and dtype of `Capture.loss`, or, in a step without a backward, of `Capture.first_scalar`."""
        position = self.capture.loss if self.with_backward else self.capture.first_scalar
        return None if position is None else Loss(position, example(self.capture.results[position]).dtype)

    @property
    def memory_budget(self) -> float:
        """The memory that one rank may use, in bytes."""
        return self.options.memory_bytes or memory_of(self.mesh.device_type)

    def schedule(self, costs: Costs) -> Schedule:
        """The schedule for stages with these costs.

        Raises:
            InvalidScheduleError: the schedule does not fit this model, or has no backwards where they are needed.
        """
        plan, mesh = self.distribution.final_plan, self.mesh
        schedule = choose_schedule(self.options.schedule or plan.schedule, costs, mesh.pipe, plan.microbatches)
        check_placement(schedule, self.distribution.placement)
        if not self.with_backward:
            return forward_only(schedule)
        check_trains(schedule)
        return schedule


@dataclass(frozen=True, slots=True)
class _Planned:
    """What every rank derives identically: the stages, the transfers between them, the schedule, and their costs."""

    stages: Sequence[PlannedStage]
    pipeline: Pipeline
    schedule: Schedule
    costs: Costs
    programs: tuple[Program, ...] = ()
    """Of every pipe rank; empty until the ranks have agreed on the schedule."""

    def with_programs(self, mesh: Mesh) -> _Planned:
        """The same with programs, which are checked to be free of deadlocks."""
        programs = lower(self.schedule, self.pipeline.edges, lookahead_on(mesh))
        messages = pipeline_messages(self.stages, [reshard.crossing for reshard in self.pipeline.reshards])
        check_programs(programs, self.schedule, self.pipeline.edges, messages)
        return replace(self, programs=programs)

    @property
    def peaks(self) -> tuple[RankMemory, ...]:
        """The peak memory of each pipe rank."""
        return peak_memory(self.programs, self.schedule, self.pipeline.edges, self.costs.memory)


def _plan(task: _Task) -> _Planned:
    """Make the plan that must be equal on all ranks, and compare digests of it; a collective of all ranks."""
    capture, options, distribution = task.capture, task.options, task.distribution
    stages = _stages(task)
    assign_buffers(capture, stages, distribution)
    warn_of_batch_mixing([stage.joint for stage in stages], capture, distribution)
    pipeline = join_stages(stages, distribution, options.strategy, options.algorithm, task.log)
    costs = estimate_costs(stages, pipeline, task.mesh, distribution.placement)
    schedule = task.schedule(costs)
    if task.with_backward and is_first_rank() and (warning := few_microbatches_warning(schedule, costs.edges)):
        warnings.warn(warning, stacklevel=2)
    planned = _Planned(stages, pipeline, schedule, costs)
    with warning_of_a_long_wait(_ALL_RANKS_COMPILE.format(_arguments(capture, distribution))):
        check_agreement(_facts(task, planned))
    return planned


def _stages(task: _Task) -> tuple[PlannedStage, ...]:
    """The stages that `distribute` planned for the same program; planned anew if a dump has to show every pass."""
    known = task.distribution.planned.get(task.capture.signature())
    if known is not None and task.with_backward and task.options.dump is None:
        return known
    boundaries = task.distribution.final_plan.stages
    return plan_stages(task.capture, task.distribution, boundaries, with_backward=task.with_backward, log=task.log)


def _compile(task: _Task, planned: _Planned) -> tuple[list[CompiledStage], Program]:
    """This rank's compiled stages, and the program that runs them; a collective of all ranks."""
    options, mesh = task.options, task.mesh
    graphs, planned = _divide(task, planned)
    model = GraphModel(mesh, prices_of(mesh))
    # Over NCCL, that is on GPUs, a fused op may have no kernel, or a slow one.
    tries = mesh.moves_in_groups and options.lowering != SLEEP
    overlap, fuse = options.overlapping, options.fuse
    graphs = compile_stages(graphs, model, fuse, overlap, task.log, gather_costs=of_all_ranks, tries_fused_ops=tries)
    check_collectives({name: started for each in graphs for name, started in each.started.items()})
    lowering = lowering_named(options.lowering, model.compute_us)
    with joint_compilation(mesh.hosts.count(mesh.hosts[mesh.rank])):
        own = [lower_stage(each, lowering) for each in graphs]
    if options.profile:
        costs = gather_costs(replace(planned.costs, compute_us={stage.index: profile_stage(stage) for stage in own}))
        planned = replace(planned, costs=costs)
        if task.with_backward:  # the order of forwards does not depend on times
            planned = replace(planned, schedule=task.schedule(costs)).with_programs(mesh)
    peaks = planned.peaks
    check_memory(peaks, task.memory_budget)
    _dump_program(task, planned, peaks)
    return own, planned.programs[mesh.coordinate["pipe"]]


def _divide(task: _Task, planned: _Planned) -> tuple[list[StageGraphs], _Planned]:
    """The graphs of this rank's stages, and the plan with the memory of all stages; a collective of all ranks.

    Gathers and reductions over z may run per microbatch or once per step. Of the choices that the options leave open,
    this takes the first whose predicted memory fits on every rank, otherwise the last.
    """
    options, mesh, distribution = task.options, task.mesh, task.distribution
    planned, schedule = planned.with_programs(mesh), planned.schedule
    own = [planned.stages[index] for index in schedule.stages_of(mesh.coordinate["pipe"])]
    local = [localize_stage(stage, distribution) for stage in own]
    remat = Remat(options.remat, options.gathered_bytes)
    overlap, fuses = options.overlapping, options.lowering == INDUCTOR
    graphs: list[StageGraphs] = []
    microbatches = distribution.final_plan.microbatches
    for storage in storage_choices(options.gather_weights, options.reduce_gradients, microbatches, mesh.z):
        graphs = [
            divide_stage(stage, graph, distribution, schedule, storage, remat, overlap, fuses=fuses)
            for stage, graph in zip(own, local, strict=True)
        ]
        memory = {each.index: each.memory for each in graphs}
        planned = replace(planned, costs=gather_costs(replace(planned.costs, memory=memory)))
        if max(peak.peak_bytes for peak in planned.peaks) <= task.memory_budget:
            break
    return graphs, planned


def _connect(task: _Task, planned: _Planned, own: Sequence[CompiledStage], program: Program) -> Executor:
    """Open the transports between stages, and make this rank's executor; a collective of all ranks."""
    capture, mesh, microbatches = task.capture, task.mesh, task.distribution.final_plan.microbatches
    timeout = timedelta(seconds=task.options.transfer_timeout_s)
    reshards, answered = planned.pipeline.reshards, task.loss is None
    connections = connect(reshards, own, mesh, microbatches, timeout, answered=answered)
    batch_dims = {port.name: dim for port, dim in capture.batch_dims.items()} | {RANDOM_STATE.name: 0}
    executor = Executor(mesh, program, own, connections, microbatches, batch_dims, task.loss)
    check_collectives(executor.gradient_sums)
    return executor


def _dump_program(task: _Task, planned: _Planned, peaks: Sequence[RankMemory]) -> None:
    dump = task.log.dump
    dump.text("schedule", planned.schedule)
    dump.text("program", planned.programs[task.mesh.coordinate["pipe"]])
    dump.text("memory", "\n".join(map(str, (MEMORY_HEADER, *peaks))))
    if task.with_backward:  # or an evaluation would overwrite the costs of the training step
        microbatches = task.distribution.final_plan.microbatches
        dump.json("costs", replace(planned.costs, num_microbatches=microbatches).to_json())


def _warn_of_meaningless_results(options: Options) -> None:
    given = {"strategy": (options.strategy, SIGNAL), "lowering": (options.lowering, SLEEP)}
    for name, (chosen, meaningless) in given.items():
        if chosen == meaningless and is_first_rank():
            warnings.warn(f'with {name}="{chosen}" all results are meaningless; only the times are valid', stacklevel=2)


def _facts(task: _Task, planned: _Planned) -> dict[str, str]:
    """What must be equal on all ranks, by the name under which an error reports it."""
    options, distribution, mesh = task.options, task.distribution, task.mesh
    crossings = (f"{reshard.crossing} {reshard.plan.digest}" for reshard in planned.pipeline.reshards)
    return {
        "the mesh": str(mesh),
        "the hosts of ranks": str(mesh.hosts),
        "the cluster": str(cluster_of(mesh)),
        "the arguments of the forward": _arguments(task.capture, distribution),
        "the captured forward": task.capture.signature(),
        "the plan": str(distribution.final_plan),
        "the layouts between stages": "\n".join(str(stage.border) for stage in planned.stages),
        "the transfers between stages": "\n".join(crossings),
        "the schedule": str(planned.schedule),
        "the options for results": f"{options.results} {options.check_inputs}",
        "the options for memory": f"{options.memory_bytes} {options.gather_weights} {options.reduce_gradients} "
        f"{options.remat} {options.gathered_bytes}",
    }


def _arguments(capture: Capture, distribution: Distribution) -> str:
    """The tensor arguments of the forward, one per line: name, dtype, and shape of one microbatch."""
    entering = [(port, node) for node, port in capture.sources.items() if port.kind is PortKind.INPUT]
    return "\n".join(
        f"{distribution.argument_name(int(port.name))}: {example(node).dtype} {tuple(example(node).shape)}"
        for port, node in entering
    )
