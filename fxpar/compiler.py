"""The road of a graph: every pass, in order, from Dynamo's forward to the compiled stages of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.dump import Dump
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import tensor
from fxpar.ir.overlap_options import NO_OVERLAP, Fuse, Overlap
from fxpar.ir.remat import NO_REMAT, Remat
from fxpar.ir.stage import (
    CompiledGathers,
    CompiledReductions,
    CompiledSplit,
    CompiledStage,
    JointGraph,
    PlannedStage,
    StageGraph,
)
from fxpar.ir.storage_options import Storage
from fxpar.layouts.pins import Pins
from fxpar.lowering import Lowering
from fxpar.lowering.aten import lower_to_aten
from fxpar.lowering.first_calls import call_fused_ops
from fxpar.model.distribution import Distribution
from fxpar.passes.bucket_collectives import bucket_collectives
from fxpar.passes.decompose.norm_policy import foresee
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.fuse_collectives import fuse_collectives
from fxpar.passes.fusion.fusion_costs import CostsByGraph, estimate_fusions
from fxpar.passes.fusion.verdicts import Verdict, Verdicts
from fxpar.passes.hoist_storage import Gathers, Hoisted, Reductions, hoist_storage
from fxpar.passes.insert_collectives import communicating, insert_collectives
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.passes.logical_random import logical_random
from fxpar.passes.memory.activation_memory import kept_memory
from fxpar.passes.memory.stage_memory import stage_memory
from fxpar.passes.memory.working_memory import working_bytes
from fxpar.passes.overlap_collectives import overlap_collectives
from fxpar.passes.partition import Partitioned, partition
from fxpar.passes.pins.pin_edges import pin_edges
from fxpar.passes.pins.pin_parameters import pin_parameters
from fxpar.passes.propagate_layouts import propagate_layouts
from fxpar.passes.shard_storage import shard_storage
from fxpar.passes.split_backward import SplitBackward, split_backward
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from fxpar.resharding.pipeline import Pipeline
from fxpar.schedule import Schedule
from fxpar.schedule.memory import StageMemory
from fxpar.world.mesh import Mesh


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
    border = propagate_layouts(joint, mesh, pins, prices_of(mesh), microbatches, settled, placement)
    dump.graph("propagate_layouts", joint.module, stage.index)
    # After layouts are chosen, since what is stored where along z depends on where it lies along the other axes.
    border = shard_storage(joint, border, mesh)
    if mesh.z > 1:
        dump.graph("shard_storage", joint.module, stage.index)
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


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """The graphs that a rank runs for a stage of its own, and what they take in memory.

    `local` is all of it in one graph; `parts`, and the `halves` of a backward that the schedule splits, are what of it
    is run for each microbatch.
    """

    planned: PlannedStage
    local: JointGraph
    hoisted: Hoisted
    parts: Partitioned
    halves: SplitBackward | None
    runs_whole_backward: bool
    memory: StageMemory

    @property
    def of_microbatch(self) -> dict[str, fx.GraphModule]:
        """What runs for each microbatch, by name."""
        graphs = {"forward": self.parts.forward}
        if self.parts.backward is not None and self.runs_whole_backward:
            graphs["backward"] = self.parts.backward
        if self.halves is not None:
            graphs |= {"inputs": self.halves.inputs, "weights": self.halves.weights}
        return graphs

    @property
    def of_step(self) -> dict[str, fx.GraphModule]:
        """What runs once per step, by name."""
        graphs = {}
        if self.hoisted.gathers is not None:
            graphs["gathers"] = self.hoisted.gathers.module
        if self.hoisted.reductions is not None:
            graphs["reductions"] = self.hoisted.reductions.start
        return graphs

    def with_microbatch(self, graphs: Mapping[str, fx.GraphModule]) -> StageGraphs:
        """The same with other graphs `of_microbatch`."""
        backward = graphs.get("backward", self.parts.backward)
        parts, halves = replace(self.parts, forward=graphs["forward"], backward=backward), self.halves
        if halves is not None:
            halves = replace(halves, inputs=graphs["inputs"], weights=graphs["weights"])
        return replace(self, parts=parts, halves=halves)

    @property
    def started(self) -> dict[str, list[str]]:
        """The collectives that each graph starts, in order, by a name that is the same on all ranks of the stage."""
        graphs = self.of_microbatch | self.of_step
        return {self.name(kind): communicating(module.graph) for kind, module in graphs.items()}

    def name(self, kind: str) -> str:
        """Of a graph `of_microbatch` or `of_step`, among those of all stages."""
        return f"{kind} of stage {self.planned.joint.index}"


def localize_stage(planned: PlannedStage, distribution: Distribution) -> JointGraph:
    """The pass by which a stage becomes what this rank does for it; done once for all schedules."""
    known = distribution.localized
    if planned.joint.module not in known:
        known[planned.joint.module] = localize(planned.joint, distribution.mesh)
    return known[planned.joint.module]


def localize(joint: JointGraph, mesh: Mesh) -> JointGraph:
    """What this rank of `mesh` does for a stage, in one graph."""
    local = insert_collectives(joint, mesh)
    # At once, since passes from here on divide and order what collectives there are.
    bucket_collectives(local.module)
    return local


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
    """The passes that divide what `localize_stage` gives into what runs at different times.

    Args:
        overlap: by which their collectives will be ordered.
        fuses: whether the lowering makes one kernel of several operations, by which they take less memory.
    """
    index = planned.joint.index
    # Before the forward is cut off, so that nothing is saved that is there for the whole step.
    hoisted = hoist_storage(local, gathers=storage.gathers_once, reductions=storage.reduces_once)
    parts = partition(hoisted.body, remat)
    # After the forward is cut off, so that it saves the same values whatever the schedule.
    is_split = schedule.splits(index) and parts.backward is not None
    halves = split_backward(hoisted.body, parts) if is_split else None
    owners = distribution.final_plan.parameters
    own = {name for name, parameter in owners.items() if parameter.stage == index}
    working = working_bytes(hoisted.body, parts, halves, overlap, fuses=fuses)
    memory = stage_memory(local, hoisted, kept_memory(hoisted.body, parts, halves), own, working)
    return StageGraphs(planned, local, hoisted, parts, halves, schedule.runs_whole(index), memory)


def estimate_stage_fusions(graphs: StageGraphs, model: GraphModel, overlap: Overlap) -> CostsByGraph:
    """What `fuse_stage` decides by, as far as this rank knows."""
    return {
        graphs.name(kind): estimate_fusions(module, model, overlap)
        for kind, module in (graphs.of_microbatch | graphs.of_step).items()
    }


def try_stage_fusions(graphs: StageGraphs, costs: CostsByGraph, fuse: Fuse) -> CostsByGraph:
    """The costs of this stage once its fused ops have been called, for the first time; of all its ranks together."""
    stage, verdicts = fuse_stage(graphs, costs, fuse, Dump(None, 0))
    unfused = {graphs.name(kind): call_fused_ops(module) for kind, module in stage.of_microbatch.items()}
    return {
        name: [each.cost.tried(runs_unfused=each.fused in unfused.get(name, ())) for each in of_graph]
        for name, of_graph in verdicts.items()
    }


def fuse_stage(graphs: StageGraphs, costs: CostsByGraph, fuse: Fuse, dump: Dump) -> tuple[StageGraphs, Verdicts]:
    """The pass that makes one op of collectives and matmuls, and its verdicts on all collectives of each graph.

    Before collectives are ordered, since what is fused runs beside nothing else; after the graphs are divided, since
    the parts of a fused op could not run at different times.
    """
    _dump_graphs(graphs, dump)
    fused: dict[str, fx.GraphModule] = {}
    verdicts: dict[str, Sequence[Verdict]] = {}
    for kind, module in (graphs.of_microbatch | graphs.of_step).items():
        found = fuse_collectives(module, costs[graphs.name(kind)], fuse)
        verdicts[graphs.name(kind)] = found.verdicts
        if kind in graphs.of_microbatch:
            fused[kind] = found.module
        if any(verdict.fused is not None for verdict in found.verdicts):
            dump.graph(f"fuse_collectives_{kind}", found.module, graphs.planned.joint.index)
    return graphs.with_microbatch(fused), verdicts


def overlap_stage(graphs: StageGraphs, overlap: Overlap, dump: Dump) -> StageGraphs:
    """The pass that orders what runs for each microbatch; last, since all passes before make orders of their own."""
    ordered = {name: overlap_collectives(module, overlap) for name, module in graphs.of_microbatch.items()}
    for name, module in ordered.items():
        dump.graph(f"overlap_collectives_{name}", module, graphs.planned.joint.index)
    return graphs.with_microbatch(ordered)


def lower_stage(graphs: StageGraphs, lowering: Lowering) -> CompiledStage:
    """The pass that makes code of what the schedule runs."""
    hoisted, parts, halves = graphs.hoisted, graphs.parts, graphs.halves
    body = hoisted.body
    pieces = [tensor(node) for node in body.module.graph.find_nodes(op="placeholder")]
    return CompiledStage(
        body.index,
        lowering(parts.forward),
        lowering(parts.backward) if parts.backward is not None and graphs.runs_whole_backward else None,
        body.inputs,
        body.outputs,
        body.tangents,
        body.gradients,
        graphs.planned.border,
        tuple(pieces[: len(body.inputs)]),
        tuple(pieces[len(body.inputs) :]),
        None if halves is None else _lower_split(halves, lowering),
        None if hoisted.gathers is None else _lower_gathers(hoisted.gathers),
        None if hoisted.reductions is None else _lower_reductions(hoisted.reductions),
    )


def _dump_graphs(graphs: StageGraphs, dump: Dump) -> None:
    index, hoisted, halves = graphs.planned.joint.index, graphs.hoisted, graphs.halves
    dump.graph("insert_collectives", graphs.local.module, index)
    if hoisted.gathers is not None:
        dump.graph("gather_weights", hoisted.gathers.module, index)
    dump.graph("partition_forward", graphs.parts.forward, index)
    if graphs.parts.backward is not None:
        dump.graph("partition_backward", graphs.parts.backward, index)
    if halves is not None:
        dump.graph("split_backward_inputs", halves.inputs, index)
        dump.graph("split_backward_weights", halves.weights, index)
    if hoisted.reductions is not None:
        dump.graph("reduce_gradients", hoisted.reductions.module, index)


def _lower_split(halves: SplitBackward, lowering: Lowering) -> CompiledSplit:
    return CompiledSplit(lowering(halves.inputs), lowering(halves.weights), halves.inputs_saved, halves.weights_saved)


# What runs once per step is collectives and copies: nothing that compiling would make faster.


def _lower_gathers(gathers: Gathers) -> CompiledGathers:
    pieces = tuple(tensor(node) for node in gathers.module.graph.find_nodes(op="placeholder"))
    return CompiledGathers(tuple(port.name for port in gathers.ports), lower_to_aten(gathers.module), pieces)


def _lower_reductions(reductions: Reductions) -> CompiledReductions:
    names = tuple(port.name for port in reductions.ports)
    return CompiledReductions(names, lower_to_aten(reductions.start), lower_to_aten(reductions.finish))
