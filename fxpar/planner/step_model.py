"""What a training step comes to on a mesh of ranks that need not exist: time, memory, and communication by axis."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpar.annotate import Move, tensor
from fxpar.compiler import divide_stage, join_stages
from fxpar.dump import Dump
from fxpar.errors import MicrobatchError
from fxpar.hints import Entry, resolve_hints
from fxpar.mesh import Mesh, num_batch_shards
from fxpar.model.arguments import split_dim
from fxpar.model.choose_schedule import choose_schedule
from fxpar.model.distribution import Distribution, logical_parameters
from fxpar.model.logical import install
from fxpar.model.make_plan import make_plan
from fxpar.overlap import Overlap
from fxpar.passes.extract import returned
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.overlap_collectives import overlap_collectives
from fxpar.pipeline import Pipeline
from fxpar.plan import Plan
from fxpar.planner.graph_time import GraphModel, GraphTime, Traffic, add_up
from fxpar.planner.prices import prices_of
from fxpar.planner.stage_times import estimate_costs
from fxpar.planner.storage import AUTO, Storage, storage_choices
from fxpar.runtime.gradients import BUCKET_BYTES, partial_axes, summed_over_z
from fxpar.schedule import Costs, Kind, Schedule, StageMemory, lower, peak_memory, simulate
from fxpar.stage import JointGraph, PlannedStage, PortKind


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step comes to.

    plan: by which `distribute` makes it so.
    step_us: from start to end, pipeline, waits and reductions included.
    compute_us: what the busiest rank computes.
    peak_bytes: of the fullest rank, with gradients and the states of the optimizer.
    traffic: by axis, of the rank that communicates longest along it; messages between stages count as "pipe".
    """

    plan: Plan
    step_us: float
    compute_us: float
    peak_bytes: int
    traffic: Mapping[str, Traffic]


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage on one of its ranks: its actions for one microbatch, and what is done once per step."""

    actions: Mapping[Kind, GraphTime]
    once_us: float
    once: Mapping[str, Traffic]
    memory: StageMemory

    @property
    def microbatch(self) -> list[GraphTime]:
        """Forward and backward of one microbatch; where the schedule splits only some backwards, as if none were."""
        kinds: Sequence[Kind] = ("F", "B") if "B" in self.actions else ("F", "I", "W")
        return [self.actions[kind] for kind in kinds if kind in self.actions]

    def traffic(self, microbatches: int) -> Mapping[str, Traffic]:
        """Of a whole step."""
        each = add_up(action.traffic for action in self.microbatch)
        return add_up([self.once, {axis: traffic.times(microbatches) for axis, traffic in each.items()}])


class StepModel:
    """The step of a model on `mesh`, whose stages are as many as its pipe ranks; nothing of the model is changed.

    Its graphs are made as they would be to run, on the mesh's process groups, which may be imagined ones.

    Args:
        model: best built under `torch.device("meta")`.
        batch: the arguments of its forward for all ranks together: a tuple, or a dict of keywords; meta tensors do.
        layouts, batch_dims: as of `distribute`.

    Raises:
        MicrobatchError: the batch does not divide.
        and what planning raises.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Sequence[Any] | Mapping[str, Any],
        mesh: Mesh,
        microbatches: int,
        layouts: Mapping[str, Sequence[Entry]] | None = None,
        batch_dims: Mapping[str | int, int | None] | None = None,
    ) -> None:
        local = local_batch(batch, num_batch_shards(mesh), microbatches, batch_dims or {})
        own = copy.deepcopy(model)
        parameters = logical_parameters(own)
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        hints = resolve_hints(layouts or {}, shapes, [path for path, _ in own.named_modules() if path])
        self._distribution = Distribution(own, mesh, hints, parameters, microbatches, batch_dims or {})
        install(self._distribution)
        self._distribution.plan = make_plan(self._distribution, None, "1f1b", local)
        (self._stages,) = self._distribution.planned.values()
        self._prices = prices_of(mesh)
        self._graphs = GraphModel(mesh, self._prices)

    def estimate(self, schedule: str, budget_bytes: float = math.inf, overlap: Overlap | None = None) -> Estimate:
        """The step by the schedule of that name, with one stage on each rank.

        What is stored in shards is handled by the first way that fits into `budget_bytes`, else by the last.
        """
        mesh, microbatches = self._distribution.mesh, self._distribution.microbatches
        pipeline = self._pipeline
        costs = estimate_costs(self._stages, pipeline, mesh, self._distribution.placement)
        chosen = choose_schedule(schedule, costs, mesh, microbatches)
        programs = lower(chosen, pipeline.edges)
        stages, peak = [], 0
        for storage in storage_choices(AUTO, AUTO, microbatches, mesh.z):
            stages = [self._stage(index, chosen, storage, overlap or Overlap()) for index in range(len(self._stages))]
            memory = {index: stage.memory for index, stage in enumerate(stages)}
            peak = max(rank.peak_bytes for rank in peak_memory(programs, chosen, pipeline.edges, memory))
            if peak <= budget_bytes:
                break
        times = {i: {kind: action.total_us for kind, action in s.actions.items()} for i, s in enumerate(stages)}
        makespan_us = simulate(programs, replace(costs, compute_us=times)).makespan_us
        return Estimate(
            replace(self._distribution.final_plan, schedule=schedule),
            makespan_us + max(stage.once_us for stage in stages),
            microbatches * max(sum(action.compute_us for action in stage.microbatch) for stage in stages),
            peak,
            self._traffic(stages, costs),
        )

    @cached_property
    def _pipeline(self) -> Pipeline:
        return join_stages(self._stages, self._distribution, "broadcast", "balance", Dump(None, 0))

    @cached_property
    def _local(self) -> list[JointGraph]:
        """The local graph of each stage, on the first of its ranks: it has the largest pieces."""
        mesh, placement = self._distribution.mesh, self._distribution.placement
        ranks = [mesh.rank_at({"pipe": pipe}) for pipe in placement]
        return [
            insert_collectives(stage.joint, replace(mesh, rank=rank))
            for stage, rank in zip(self._stages, ranks, strict=True)
        ]

    def _stage(self, index: int, schedule: Schedule, storage: Storage, overlap: Overlap) -> _Stage:
        graphs = divide_stage(self._stages[index], self._local[index], self._distribution, schedule, storage)

        def time(module: fx.GraphModule) -> GraphTime:
            return self._graphs.time(overlap_collectives(module, overlap))

        actions: dict[Kind, GraphTime] = {"F": time(graphs.parts.forward)}
        if graphs.parts.backward is not None and graphs.runs_whole_backward:
            actions["B"] = time(graphs.parts.backward)
        if graphs.halves is not None:
            actions |= {"I": time(graphs.halves.inputs), "W": time(graphs.halves.weights)}
        once = [self._reductions(graphs.planned, graphs.local)]
        once += [self._graphs.time(part.module) for part in (graphs.hoisted.gathers, graphs.hoisted.reductions) if part]
        once_us = sum(each.total_us for each in once)
        return _Stage(actions, once_us, add_up(each.traffic for each in once), graphs.memory)

    def _reductions(self, planned: PlannedStage, local: JointGraph) -> GraphTime:
        """All-reduces of gradients when all microbatches are summed: of what is partial, then over the batch's axes."""
        layouts = {port.name: layout for port, layout in planned.border.gradients.items()}
        scattered = summed_over_z(layouts)
        num_bytes: defaultdict[str, int] = defaultdict(int)
        for node, port in zip(returned(local.module)[len(local.outputs) :], local.gradients, strict=True):
            if port.kind is PortKind.PARAMETER:
                over_batch = ("data",) if port.name in scattered else ("data", "z")
                for axis in (*partial_axes(layouts[port.name]), *over_batch):
                    num_bytes[axis] += tensor(node).nbytes
        traffic = {axis: self._in_buckets(axis, of_axis) for axis, of_axis in num_bytes.items()}
        return GraphTime(sum(each.time_us for each in traffic.values()), 0.0, traffic)

    def _in_buckets(self, axis: str, num_bytes: int) -> Traffic:
        whole, rest = divmod(num_bytes, BUCKET_BYTES)
        parts = [BUCKET_BYTES] * whole + [rest] * (rest > 0)
        return add_up({axis: self._graphs.traffic(Move("all_reduce", axis, part))} for part in parts)[axis]

    def _traffic(self, stages: Sequence[_Stage], costs: Costs) -> dict[str, Traffic]:
        microbatches = self._distribution.microbatches
        of_stages = [stage.traffic(microbatches) for stage in stages]
        axes = {axis for traffic in of_stages for axis, of_axis in traffic.items() if of_axis.num_collectives}
        found = {
            axis: max((traffic.get(axis, Traffic()) for traffic in of_stages), key=lambda each: each.time_us)
            for axis in sorted(axes)
        }
        return found | self._between_stages(costs)

    def _between_stages(self, costs: Costs) -> dict[str, Traffic]:
        """What the interface of the busiest host sends from stage to stage, and the time of all transfers."""
        if not costs.transfers:
            return {}
        busy = Counter[str]()
        for cost in costs.transfers.values():
            busy.update({link: us for link, us in cost.busy_us.items() if link.endswith("sends")})
        sent = max(busy.values(), default=0.0) * self._prices.network.bytes_per_us
        time_us = sum(cost.time_us for cost in costs.transfers.values())
        return {"pipe": Traffic(len(costs.transfers), sent, time_us).times(self._distribution.microbatches)}


def local_batch(
    batch: Sequence[Any] | Mapping[str, Any],
    num_shards: int,
    microbatches: int,
    batch_dims: Mapping[str | int, int | None],
) -> Sequence[Any] | Mapping[str, Any]:
    """What one of `num_shards` shards has of the whole batch.

    Raises:
        MicrobatchError: shards and microbatches do not divide it.
    """
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    leaves, structure = pytree.tree_flatten((args, kwargs))
    parts = num_shards * microbatches
    local = []
    for position, (leaf, dim) in enumerate(zip(leaves, split_dim(args, kwargs, batch_dims), strict=True)):
        if dim is not None and leaf.shape[dim] % parts:
            raise MicrobatchError(str(position), leaf.shape[dim], parts)
        local.append(leaf if dim is None else leaf.narrow(dim, 0, leaf.shape[dim] // num_shards))
    own: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(local, structure)
    return own[1] if isinstance(batch, Mapping) else own[0]
