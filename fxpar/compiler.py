"""Every pass, in order, from the forward that Dynamo captured to the graphs that a rank runs.

1. `plan_stages`, on every rank for all stages, in logical shapes: split into stages, differentiate, choose layouts.
2. `join_stages`, on every rank: plan the transfers between the meshes of stages.
3. `localize_stage`: make the local graph of a stage on this rank, with its collectives.
4. `divide_stage`: partition it into forward and backward graphs, by the schedule and the available memory.
5. `compile_stages`: fuse collectives with matmuls, or overlap them with other computation.
6. `lower_stage`: compile the graphs.

`build_step` calls these functions on the ranks that run the step; `planner.step_model` calls them to estimate a step
that is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.graph.invariants import Form
from fxpar.ir.capture import Capture
from fxpar.ir.overlap_options import NO_OVERLAP, Fuse, Overlap
from fxpar.ir.remat import NO_REMAT, Remat
from fxpar.ir.stage import JointGraph, PlannedStage, StageGraph
from fxpar.ir.storage_options import Storage
from fxpar.layouts.pins import Pins
from fxpar.layouts.search_once import Searched
from fxpar.model.distribution import Distribution
from fxpar.pass_log import PassLog
from fxpar.passes.bucket_collectives import bucket_collectives
from fxpar.passes.cast_gradients import cast_gradients
from fxpar.passes.decompose.norm_policy import choose_norm_policy
from fxpar.passes.decompose_for_sharding import Decomposed, decompose_for_sharding
from fxpar.passes.find_result_samples import find_result_samples
from fxpar.passes.fuse_stages import GatherCosts, fuse_stages
from fxpar.passes.hoist_storage import hoist_storage
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.passes.logical_random import logical_random
from fxpar.passes.lower_stage import lower_stage
from fxpar.passes.memory.activation_memory import activation_memory
from fxpar.passes.memory.stage_memory import stage_memory
from fxpar.passes.memory.working_memory import working_bytes
from fxpar.passes.overlap_collectives import overlap_collectives
from fxpar.passes.partition import partition
from fxpar.passes.pins.pin_edges import pin_edges
from fxpar.passes.pins.pin_parameters import pin_parameters
from fxpar.passes.propagate_layouts import propagate_layouts
from fxpar.passes.shard_storage import shard_storage
from fxpar.passes.split_backward import split_backward
from fxpar.passes.split_stages import split_stages
from fxpar.passes.stage_graphs import StageGraphs
from fxpar.passes.trace_joint import Traced, trace_joint
from fxpar.progress.phases import as_phase, phase
from fxpar.resharding.pipeline import Pipeline
from fxpar.schedule import Schedule
from fxpar.world.mesh import Mesh

__all__ = [
    "compile_stages",
    "divide_stage",
    "join_stages",
    "localize",
    "localize_stage",
    "lower_stage",
    "plan_stages",
]


@as_phase
def plan_stages(
    capture: Capture,
    distribution: Distribution,
    boundaries: Sequence[str],
    *,
    with_backward: bool = True,
    log: PassLog | None = None,
) -> tuple[PlannedStage, ...]:
    """Run the passes that every rank runs for the whole model; they allocate nothing, and all shapes are logical.

    Raises: what the passes raise.
    """
    log = log or PassLog()
    log.graph("capture", capture.module, None)
    planned: list[PlannedStage] = []
    known, microbatches = _Known(), distribution.microbatches_of(capture)
    stages = split_stages(capture, boundaries)
    for number, stage in enumerate(stages, start=1):
        log.graph("split_stages", stage.module, None, stage.index)
        with phase(f"stage {stage.index} ({number} of {len(stages)})"):
            planned.append(_plan_stage(stage, planned, known, distribution, microbatches, with_backward, log))
    samples = find_result_samples([stage.joint for stage in planned], capture, distribution)
    planned[-1] = replace(planned[-1], samples=samples)
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class _Known:
    """What passes keep of earlier stages, so that their time grows with the kinds of layers and stages, not with all.

    It lives as long as one call of `plan_stages`: all fake values are of one mode.
    """

    traced: Traced = field(default_factory=dict)
    decomposed: Decomposed = field(default_factory=dict)
    searched: Searched = field(default_factory=dict)


def _plan_stage(
    stage: StageGraph,
    earlier: Sequence[PlannedStage],
    known: _Known,
    distribution: Distribution,
    microbatches: int,
    with_backward: bool,
    log: PassLog,
) -> PlannedStage:
    joint = trace_joint(stage, with_backward=with_backward, known=known.traced)
    log.graph("trace_joint", joint.module, Form.LOGICAL, stage.index)
    reduce_dtypes = {name: parameter.reduce_dtype for name, parameter in distribution.parameters.items()}
    cast_gradients(joint, reduce_dtypes)
    log.graph("cast_gradients", joint.module, Form.LOGICAL, stage.index, shows=distribution.precision is not None)
    # Before any pass that uses the mesh, since random numbers must not depend on it.
    joint = logical_random(joint)
    log.graph("logical_random", joint.module, Form.LOGICAL, stage.index)
    settled = [stage.border for stage in earlier]
    placement = distribution.placement
    pins = Pins({**pin_parameters(joint, distribution, settled), **pin_edges(joint, placement, settled)})
    mesh = distribution.mesh
    # Before layouts are chosen, since a loss over a sharded vocabulary is only possible in decomposed form.
    norm_policy = choose_norm_policy(joint, mesh, pins)
    joint = replace(joint, module=decompose_for_sharding(joint.module, norm_policy, known.decomposed))
    log.graph("decompose_for_sharding", joint.module, Form.LOGICAL, stage.index)
    prices, searched = prices_of(mesh), known.searched
    border = propagate_layouts(joint, mesh, pins, prices, microbatches, settled, placement, searched)
    log.graph("propagate_layouts", joint.module, Form.LAID_OUT, stage.index)
    # After layouts are chosen, since the sharding of a weight over z depends on its layout over the other axes.
    border = shard_storage(joint, border, mesh)
    log.graph("shard_storage", joint.module, Form.LAID_OUT, stage.index, shows=mesh.z > 1)
    return PlannedStage(joint, border)


@as_phase
def join_stages(
    stages: Sequence[PlannedStage], distribution: Distribution, strategy: str, algorithm: str, log: PassLog
) -> Pipeline:
    """The pass that every rank runs once all stages are planned: it plans all transfers between them.

    Raises: what the pass raises.
    """
    owners, placement = distribution.final_plan.parameters, distribution.placement
    pipeline = insert_reshards(stages, distribution.mesh, owners, placement, strategy=strategy, algorithm=algorithm)
    log.graph("insert_reshards", pipeline.module, None)
    if pipeline.reshards:
        log.dump.text("reshard_plans", pipeline)
    return pipeline


@as_phase
def localize_stage(planned: PlannedStage, distribution: Distribution) -> JointGraph:
    """The local graph of a stage on this rank; made once for all schedules."""
    known = distribution.localized
    if planned.joint.module not in known:
        known[planned.joint.module] = localize(planned.joint, distribution.mesh)
    return known[planned.joint.module]


def localize(joint: JointGraph, mesh: Mesh) -> JointGraph:
    """The local graph of a stage on this rank of `mesh`: forward and backward, in local shapes, with collectives."""
    log = PassLog()
    local = insert_collectives(joint, mesh)
    log.graph("insert_collectives", local.module, Form.LOCAL, joint.index, coordinate=mesh.coordinate)
    # At once, since all later passes divide and order collectives.
    bucket_collectives(local.module)
    log.graph("bucket_collectives", local.module, Form.LOCAL, joint.index, coordinate=mesh.coordinate)
    return local


@as_phase
def divide_stage(
    planned: PlannedStage,
    local: JointGraph,
    distribution: Distribution,
    schedule: Schedule,
    storage: Storage,
    remat: Remat = NO_REMAT,
    overlap: Overlap = NO_OVERLAP,
    *,
    fuses: bool = True,
) -> StageGraphs:
    """The passes that divide the result of `localize_stage` into graphs that run at different times.

    Args:
        overlap: the options by which `compile_stages` will order their collectives.
        fuses: whether the lowering fuses several ops into one kernel, which then takes less memory.
    """
    index = planned.joint.index
    # Before the partition, so that no value is saved for the backward that stays in memory for the whole step.
    hoisted = hoist_storage(local, gathers=storage.gathers_once, reductions=storage.reduces_once)
    parts = partition(hoisted.body, remat)
    # After the partition, so that the forward saves the same values whatever the schedule.
    is_split = schedule.splits(index) and parts.backward is not None
    halves = split_backward(hoisted.body, parts) if is_split else None
    owners = distribution.final_plan.parameters
    parameters = distribution.parameters
    own = {name: parameters[name].dtype for name, parameter in owners.items() if parameter.stage == index}
    working = working_bytes(hoisted.body, parts, halves, overlap, fuses=fuses)
    memory = stage_memory(local, hoisted, activation_memory(hoisted.body, parts, halves), own, working)
    graphs = StageGraphs(planned, local, hoisted, parts, halves, schedule.runs_whole(index), memory)
    graphs.check(PassLog())
    return graphs


@as_phase
def compile_stages(
    graphs: Sequence[StageGraphs],
    model: GraphModel,
    fuse: Fuse,
    overlap: Overlap,
    log: PassLog | None = None,
    *,
    gather_costs: GatherCosts | None = None,
    tries_fused_ops: bool = False,
) -> list[StageGraphs]:
    """The passes that fuse and order the collectives of a rank's stages.

    Args:
        model: estimates the times that decide which collectives are fused.
        gather_costs, tries_fused_ops: see `fuse_stages`; needed where ranks have to agree.
    """
    log = log or PassLog()
    for each in graphs:
        each.dump(log.dump)
    # Before collectives are ordered, since a fused op overlaps with nothing else; after the graphs are divided, since
    # the parts of a fused op could not run at different times.
    fused = fuse_stages(graphs, model, fuse, overlap, log, gather_costs=gather_costs, tries_fused_ops=tries_fused_ops)
    # Last, since every earlier pass may reorder nodes.
    return [_overlap_stage(each, overlap, log) for each in fused]


def _overlap_stage(graphs: StageGraphs, overlap: Overlap, log: PassLog) -> StageGraphs:
    ordered = {name: overlap_collectives(module, overlap) for name, module in graphs.of_microbatch.items()}
    for name, module in ordered.items():
        log.graph(f"overlap_collectives_{name}", module, Form.LOCAL, graphs.index)
        log.collectives("overlap_collectives", [graphs.of_microbatch[name]], [module], graphs.index)
    return graphs.with_microbatch(ordered)
