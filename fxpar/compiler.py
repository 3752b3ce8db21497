"""The road of a graph: every pass, in order, from Dynamo's forward to the compiled stages of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpar.annotate import tensor
from fxpar.capture import Capture
from fxpar.dump import Dump
from fxpar.layouts.pin_edges import pin_edges
from fxpar.layouts.pins import Pins
from fxpar.lowering import Lowering
from fxpar.model.distribution import Distribution
from fxpar.model.pin_parameters import pin_parameters
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.passes.kept_memory import kept_memory
from fxpar.passes.logical_random import logical_random
from fxpar.passes.outlook import foresee
from fxpar.passes.partition import partition
from fxpar.passes.propagate_layouts import propagate_layouts
from fxpar.passes.split_backward import SplitBackward, split_backward
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from fxpar.pipeline import Pipeline
from fxpar.planner.prices import default_prices
from fxpar.planner.stage_memory import stage_memory
from fxpar.schedule import Schedule
from fxpar.schedule.memory import StageMemory
from fxpar.stage import CompiledSplit, CompiledStage, PlannedStage, StageGraph


def plan_stages(
    capture: Capture,
    distribution: Distribution,
    openers: Sequence[str],
    *,
    with_backward: bool = True,
    dump: Dump | None = None,
) -> tuple[PlannedStage, ...]:
    """The passes that every rank runs for the whole model: nothing is allocated, all shapes are logical.

    Raises: what the passes raise.
    """
    dump = dump or Dump(None, 0)
    dump.graph("capture", capture.module)
    planned: list[PlannedStage] = []
    for stage in split_stages(capture, openers):
        dump.graph("split_stages", stage.module, stage.index)
        planned.append(_plan_stage(stage, planned, distribution, with_backward, dump))
    return tuple(planned)


def _plan_stage(
    stage: StageGraph, earlier: Sequence[PlannedStage], distribution: Distribution, with_backward: bool, dump: Dump
) -> PlannedStage:
    joint = trace_joint(stage, with_backward=with_backward)
    dump.graph("trace_joint", joint.module, stage.index)
    # Before any mesh comes into play, since the numbers must not depend on it.
    joint = logical_random(joint)
    dump.graph("logical_random", joint.module, stage.index)
    settled = [stage.border for stage in earlier]
    placement = distribution.placement
    pins = Pins({**pin_parameters(joint, distribution, settled), **pin_edges(joint, placement, settled)})
    mesh, microbatches = distribution.mesh, distribution.microbatches
    # Before layouts are chosen, since a loss over a sharded vocabulary only exists in parts.
    joint = replace(joint, module=decompose_for_sharding(joint.module, foresee(joint, mesh, pins)))
    dump.graph("decompose_for_sharding", joint.module, stage.index)
    border = propagate_layouts(joint, mesh, pins, default_prices(mesh.device_type), microbatches, settled, placement)
    dump.graph("propagate_layouts", joint.module, stage.index)
    return PlannedStage(joint, border)


def join_stages(
    stages: Sequence[PlannedStage], distribution: Distribution, strategy: str, algorithm: str, dump: Dump
) -> Pipeline:
    """The pass that every rank runs once all stages are planned: how everything moves between them.

    Raises: what the pass raises.
    """
    owners, placement = distribution.final_plan.parameters, distribution.placement
    pipeline = insert_reshards(stages, distribution.mesh, owners, placement, strategy=strategy, algorithm=algorithm)
    dump.graph("insert_reshards", pipeline.module)
    if pipeline.reshards:
        dump.text("reshard_plans", pipeline)
    return pipeline


def compile_stage(
    planned: PlannedStage, distribution: Distribution, schedule: Schedule, lowering: Lowering, dump: Dump
) -> tuple[CompiledStage, StageMemory]:
    """The passes that a rank runs for a stage of its own: local shapes, then code of what the schedule runs.

    Also gives what the stage takes in memory.
    """
    index = planned.joint.index
    local = insert_collectives(planned.joint, distribution.mesh)
    dump.graph("insert_collectives", local.module, index)
    parts = partition(local)
    dump.graph("partition_forward", parts.forward, index)
    if parts.backward is not None:
        dump.graph("partition_backward", parts.backward, index)
    # After the forward is cut off, so that it saves the same values whatever the schedule.
    halves = split_backward(local, parts) if schedule.splits(index) else None
    if halves is not None:
        dump.graph("split_backward_inputs", halves.inputs, index)
        dump.graph("split_backward_weights", halves.weights, index)
    pieces = [tensor(node) for node in local.module.graph.nodes if node.op == "placeholder"]
    stage = CompiledStage(
        index,
        lowering(parts.forward),
        lowering(parts.backward) if parts.backward is not None and schedule.runs_whole(index) else None,
        local.inputs,
        local.outputs,
        local.tangents,
        local.gradients,
        planned.border,
        tuple(pieces[: len(local.inputs)]),
        tuple(pieces[len(local.inputs) :]),
        None if halves is None else _compile_split(halves, lowering),
    )
    owners = distribution.final_plan.parameters
    own = {name for name, planned in owners.items() if planned.stage == index}
    return stage, stage_memory(local, kept_memory(local, parts, halves), own)


def _compile_split(halves: SplitBackward, lowering: Lowering) -> CompiledSplit:
    return CompiledSplit(lowering(halves.inputs), lowering(halves.weights), halves.inputs_saved, halves.weights_saved)
