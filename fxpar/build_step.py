"""Build a step: this rank's compiled stages, their transports to other stages, and the program that runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fxpar.analysis.write_report import write_report_if_possible
from fxpar.build.announce import Announcement, Origin, announced
from fxpar.build.connected_stages import ConnectedStages, connect_stages, remember_training, stages_of_training
from fxpar.build.rank_graphs import derive_graphs
from fxpar.build.rank_program import RankProgram, keep_program, kept_program
from fxpar.build.step_facts import rank_facts, step_facts
from fxpar.build.step_plan import StepPlan, plan_step
from fxpar.build.task import Task
from fxpar.cache.own_warnings import give, recorded_warnings
from fxpar.compiler import lower_stage
from fxpar.config import ALL_STAGES, INDUCTOR, LAST_STAGE, OWN_SAMPLES, SLEEP, TENSORRT, Options
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.model_arithmetic import model_arithmetic
from fxpar.costs.prices import prices_of
from fxpar.costs.stage_times import gather_costs
from fxpar.dump import Dump
from fxpar.environment import is_first_rank
from fxpar.ir.capture import Capture
from fxpar.ir.random import RANDOM_STATE
from fxpar.ir.samples import Reduced
from fxpar.ir.stage import CompiledStage
from fxpar.lowering import lower as lowering_named
from fxpar.lowering.joint_compilation import joint_compilation
from fxpar.lowering.joint_generation import joint_generation
from fxpar.lowering.tensorrt.requirements import check_tensorrt
from fxpar.lowering.vector_isa import find_vector_isa
from fxpar.model.distribution import distribution_of
from fxpar.pass_log import PassLog
from fxpar.passes.settle_capture import settle_capture
from fxpar.passes.stage_graphs import RunGraphs, StageGraphs
from fxpar.report.facts import RANK_FACTS, STEP_FACTS, to_json
from fxpar.resharding.strategies import SIGNAL
from fxpar.runtime.batch_totals import StepTotals
from fxpar.runtime.changes import check_parameter_changes
from fxpar.runtime.executor import Executor
from fxpar.runtime.input_check import input_check
from fxpar.runtime.loss import Loss
from fxpar.runtime.profile import profile_stage
from fxpar.runtime.report_writer import ReportWriter
from fxpar.runtime.results import ResultSpec, gather_result, own_result, result_specs
from fxpar.runtime.step import Step
from fxpar.schedule import MEMORY_HEADER, Program, check_memory
from fxpar.world.agreement import check_agreement, check_collectives, of_all_ranks
from fxpar.world.lost_peers import warning_of_a_long_wait

_ALL_RANKS_COMPILE = """all other ranks to compile the model, too, for one microbatch of these arguments:
{}
A rank that is called with arguments of other shapes may run a step that it has compiled before: then this rank and that
one wait for each other. Expected the same shapes on all ranks in every step (drop_last=True for uneven last batches)"""


def build_step(capture: Capture, options: Options, *, with_backward: bool) -> Step:
    """The callable that runs a whole step of the distributed model that `capture` is of; a collective of all ranks.

    Args:
        capture: with a loss, if gradients are wanted.

    Raises:
        ForwardOnlyLoweringError: gradients are wanted, but the lowering has no backward.
        LoweringDeviceError, MissingPackageError: the lowering cannot run here.
        SharedBufferError: a stage uses a buffer that another one changes.
        PlanMismatchError: the ranks derived different plans.
        UnevenCallsError: other ranks run a step that they have compiled before.
        MemoryBudgetError: the predicted memory of a rank exceeds its budget.
        and what the passes raise.
    """
    distribution = distribution_of(capture.model)
    capture = settle_capture(capture, distribution)
    check_parameter_changes(capture.parameter_changes, distribution.final_plan.parameters)
    if options.lowering == TENSORRT:
        check_tensorrt(distribution.mesh.device_type, with_backward=with_backward)
    if capture.reported is not None and not capture.result_gradients:
        distribution.unread_arguments = {distribution.input_name(name) for name in capture.unread}
    if options.results is None:
        options = replace(options, results=OWN_SAMPLES if capture.reported is None else LAST_STAGE)
    _warn_of_meaningless_results(options)
    if not distribution.is_of_whole_batch(capture):
        options = replace(options, dump=None)  # it would take the place of the dump for all other batches
    if options.lowering == INDUCTOR and distribution.mesh.device_type == "cpu":
        find_vector_isa()  # while the passes run
    log = PassLog(Dump(options.dump, distribution.mesh.rank, traces=True))
    if distribution.layouts.shipped is not None:
        log.dump.text("shipped_plan", distribution.layouts.describe_plan())
    task = Task(capture, options, distribution, log, with_backward)
    with announced(task) as announcement:
        waited_for = _ALL_RANKS_COMPILE.format(task.arguments)
        with warning_of_a_long_wait(waited_for), distribution.calls.compiling(task.call):
            check_agreement(task.facts | {"the option timeline": str(options.timeline is not None)})
        connected = (None if with_backward else _of_training(task, announcement)) or _connected(task, announcement)
        step = _step(task, connected)
        if with_backward:
            remember_training(step, task, connected)
            # Once all ranks have dumped: `_step` ends with a collective.
            if options.dump is not None and distribution.mesh.rank == 0:
                write_report_if_possible(options.dump, measured=())
    return step


def _step(task: Task, connected: ConnectedStages) -> Step:
    """The step that `connected` runs; a collective of all ranks."""
    capture, options, distribution, mesh = task.capture, task.options, task.distribution, task.mesh
    batch_dims = {port.name: dim for port, dim in capture.batch_dims.items()} | {RANDOM_STATE.name: 0}
    microbatches, loss = task.microbatches, _loss(task, connected.derived.results)
    executor = Executor(
        mesh,
        connected.program,
        connected.stages,
        connected.connections,
        microbatches,
        batch_dims,
        loss,
        distribution.loss_scale,
        capture.differentiated if task.with_backward else (),
    )
    check_collectives(executor.gradient_sums)
    forward, backward = connected.derived.arithmetic
    arithmetic = forward + backward if task.with_backward else forward
    return Step(
        capture,
        loss,
        distribution,
        executor,
        connected.derived.results,
        task.call,
        options.timeline,
        with_backward=task.with_backward,
        gather=_GATHER[options.results],
        check_inputs=input_check(capture, distribution) if options.check_inputs else None,
        totals=_totals(task, connected.stages),
        arithmetic=arithmetic.times(microbatches),
        report=ReportWriter(options.dump) if options.dump is not None and task.with_backward else None,
    )


_GATHER: Mapping[str | None, Callable[..., Tensor]] = {
    LAST_STAGE: gather_result,
    ALL_STAGES: partial(gather_result, on_all_stages=True),
    OWN_SAMPLES: own_result,
}
"""By the option `results`."""


def _loss(task: Task, results: Sequence[ResultSpec]) -> Loss | None:
    """The loss of the task, or the number that an evaluation returns in its place, which may be a sum over samples."""
    loss = task.loss
    if loss is None or task.capture.loss is not None:
        return loss
    return replace(loss, is_total=results[loss.position].samples is Reduced.SUM)


def _totals(task: Task, stages: Sequence[CompiledStage]) -> StepTotals | None:
    """What sums over the batch before a step; None if no stage of this rank takes such sums."""
    totals = task.capture.totals
    if totals is None or not any(port in stage.inputs for port in totals.results for stage in stages):
        return None
    batch_dims = {port.name: dim for port, dim in task.capture.batch_dims.items()}
    return StepTotals(totals, task.mesh, task.microbatches, batch_dims)


def _of_training(task: Task, announcement: Announcement) -> ConnectedStages | None:
    """The forwards of a training step, if that may evaluate; a collective of all ranks."""
    connected = stages_of_training(task)
    if connected is not None:
        announcement.origin = Origin.TRAINING
    return connected


def _connected(task: Task, announcement: Announcement) -> ConnectedStages:
    found = _found(task)
    if found is not None:
        announcement.origin = Origin.EARLIER_LAUNCH
    own, program = found or _derived(task)
    return connect_stages(task, program, own)


def _found(task: Task) -> tuple[list[CompiledStage], RankProgram] | None:
    """Compiled stages and the program of an earlier launch; None if some rank has none. A collective of all ranks."""
    program = kept_program(task)
    if program is None:
        return None
    give(program.warnings)
    return _lowered(task, program.stages, _graph_model(task)), program


def _derived(task: Task) -> tuple[list[CompiledStage], RankProgram]:
    """This rank's compiled stages and program, which are kept; a collective of all ranks."""
    with recorded_warnings() as texts:
        own, program = _derive(task)
    keep_program(task, replace(program, warnings=tuple(texts)))
    return own, program


def _derive(task: Task) -> tuple[list[CompiledStage], RankProgram]:
    model, options = _graph_model(task), task.options
    graphs, plan = derive_graphs(task, plan_step(task), model)
    stages = tuple(each.run for each in graphs)
    own = _lowered(task, stages, model)
    if options.profile:
        plan = _with_profile(task, plan, own)
    check_memory(plan.peaks, task.memory_budget)
    _dump_program(task, plan)
    if task.with_backward and task.log.dump.is_read:
        _dump_facts(task, plan, graphs, model)
    program, evaluation = plan.programs[task.mesh.coordinate["pipe"]], _evaluation(task, plan)
    buffers, reshards = task.distribution.buffer_stages, tuple(plan.pipeline.reshards)
    results, arithmetic = (
        result_specs(task.capture, plan.stages[-1]),
        model_arithmetic(plan.stages, prices_of(task.mesh)),
    )
    return own, RankProgram(stages, program, reshards, results, dict(buffers), arithmetic, evaluation)


def _evaluation(task: Task, plan: StepPlan) -> Program | None:
    """This rank's program of an evaluation by the graphs of a training step, if it fits on every rank."""
    if not task.with_backward:
        return None
    alone = plan.without_backward(task.mesh)
    fits = all(peak.peak_bytes <= task.memory_budget for peak in alone.peaks)
    return alone.programs[task.mesh.coordinate["pipe"]] if fits else None


def _graph_model(task: Task) -> GraphModel:
    return GraphModel(task.mesh, prices_of(task.mesh))


def _lowered(task: Task, stages: Sequence[RunGraphs], model: GraphModel) -> list[CompiledStage]:
    lowering, mesh = lowering_named(task.options.lowering, model.compute_us, task.log.dump), task.mesh
    here = [rank for rank, host in enumerate(mesh.hosts) if host == mesh.hosts[mesh.rank]]
    place = here.index(mesh.rank)

    def of_this_host(given: Any) -> list[Any]:
        found = of_all_ranks(given)
        return [found[rank] for rank in here]

    with joint_compilation(len(here), place, of_this_host), joint_generation(place, of_this_host):
        return [lower_stage(stage, lowering) for stage in stages]


def _with_profile(task: Task, plan: StepPlan, own: Sequence[CompiledStage]) -> StepPlan:
    """The plan with measured times, and the schedule that is best by these; a collective of all ranks."""
    costs = gather_costs(replace(plan.costs, compute_us={stage.index: profile_stage(stage) for stage in own}))
    plan = replace(plan, costs=costs)
    if not task.with_backward:  # the order of forwards does not depend on times
        return plan
    return replace(plan, schedule=task.schedule(costs)).with_programs(task.mesh)


def _dump_program(task: Task, plan: StepPlan) -> None:
    dump = task.log.dump
    dump.text("schedule", plan.schedule)
    dump.text("program", plan.programs[task.mesh.coordinate["pipe"]])
    dump.text("memory", "\n".join(map(str, (MEMORY_HEADER, *plan.peaks))))
    if task.with_backward:  # or an evaluation would overwrite the costs of the training step
        dump.json("costs", replace(plan.costs, num_microbatches=task.microbatches).to_json())


def _dump_facts(task: Task, plan: StepPlan, graphs: Sequence[StageGraphs], model: GraphModel) -> None:
    """What reports are made of; an evaluation would overwrite the facts of the training step."""
    dump, mesh, options = task.log.dump, task.mesh, task.options
    dump.json(RANK_FACTS, to_json(rank_facts(graphs, model, mesh)))
    if mesh.rank == 0:
        facts = step_facts(
            task.distribution, plan, task.memory_budget, profiled=options.profile, timeline=options.timeline
        )
        dump.json(STEP_FACTS, to_json(facts))


def _warn_of_meaningless_results(options: Options) -> None:
    given = {"strategy": (options.strategy, SIGNAL), "lowering": (options.lowering, SLEEP)}
    for name, (chosen, meaningless) in given.items():
        if chosen == meaningless and is_first_rank():
            warnings.warn(f'with {name}="{chosen}" all results are meaningless; only the times are valid', stacklevel=2)
