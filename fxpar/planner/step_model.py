"""Estimate a training step on a mesh whose ranks need not exist: time, memory, and communication by axis."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from fxpar.build.stage_estimate import StageEstimate, estimate_stage
from fxpar.compiler import compile_stages, divide_stage, join_stages, localize
from fxpar.costs.graph_time import GraphModel, GraphTime, Traffic, one_after_another
from fxpar.costs.prices import Prices, agnostic_prices_of, prices_of
from fxpar.costs.stage_times import estimate_costs
from fxpar.errors import MicrobatchError
from fxpar.ir.overlap_options import Fuse, Overlap
from fxpar.ir.plan import Plan
from fxpar.ir.precision import Precision
from fxpar.ir.remat import Remat
from fxpar.ir.stage import JointGraph
from fxpar.ir.storage_options import AUTO, MICROBATCH, STEP, Storage, storage_choices
from fxpar.make_plan import make_plan
from fxpar.model.arguments import split_dim
from fxpar.model.distribution import Distribution
from fxpar.model.logical import install
from fxpar.model.resolve_layouts import Layouts
from fxpar.pass_log import PassLog
from fxpar.passes.stage_graphs import StageGraphs
from fxpar.planner.step_parts import actions_time, busiest, optimizer_us, step_parts
from fxpar.report.step_parts import StepParts
from fxpar.resharding.pipeline import Pipeline, lookahead_on
from fxpar.schedule import Costs, Program, RankMemory, lower, peak_memory, simulate
from fxpar.schedule.choose_schedule import choose_schedule
from fxpar.world.mesh import Mesh, num_batch_shards

_OVERLAP = Overlap()
"""How communication overlaps computation: the defaults of a step."""

_REMATS = (Remat("none"), Remat("min_cut"), Remat("full"), Remat("full", gathered_bytes=0))
"""What is recomputed, or gathered again, to save memory, from the least to the most."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a step.

    plan, options: those with which `distribute` and `torch.compile` make this step.
    step_us: from start to end, with pipeline, waits and reductions, without the optimizer's step.
    compute_us: the computation of the busiest rank.
    peak_bytes: the maximum over ranks, with gradients and optimizer states.
    traffic: by axis, of the rank that communicates longest along it; messages between stages count as "pipe".
    parts: what `step_us` is spent on.
    optimizer_us: the optimizer's step, if it is Adam's.
    """

    plan: Plan
    options: Mapping[str, str | float]
    step_us: float
    compute_us: float
    peak_bytes: int
    traffic: Mapping[str, Traffic]
    parts: StepParts
    optimizer_us: float


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """How a step trades memory for time."""

    remat: Remat
    storage: Storage

    @property
    def options(self) -> dict[str, str | float]:
        """The options of `torch.compile` that select this policy."""
        gathered = {} if math.isinf(self.remat.gathered_bytes) else {"gathered_bytes": self.remat.gathered_bytes}
        return gathered | {
            "remat": self.remat.policy,
            "gather_weights": STEP if self.storage.gathers_once else MICROBATCH,
            "reduce_gradients": STEP if self.storage.reduces_once else MICROBATCH,
        }


@dataclass(frozen=True, slots=True)
class DividedStep:
    """A step whose graphs are divided into the parts that the schedule runs: its memory is known, but not its time.

    schedule: its name.
    programs: of every rank of the pipeline.
    graphs: of every stage.
    peaks: the peak memory of every rank of the pipeline.
    overlap: how the collectives of the graphs will be ordered.
    """

    schedule: str
    policy: MemoryPolicy
    programs: Sequence[Program]
    graphs: Sequence[StageGraphs]
    peaks: Sequence[RankMemory]
    overlap: Overlap

    @property
    def peak_bytes(self) -> int:
        """As in `Estimate`."""
        return max(peak.peak_bytes for peak in self.peaks)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step with the graphs of its stages as they would run, their times, and the estimate that follows from them."""

    divided: DividedStep
    graphs: Sequence[StageGraphs]
    stages: Sequence[StageEstimate]
    estimate: Estimate


class StepModel:
    """The step of a model on `mesh`; the model is not changed.

    Its graphs are made as they would be to run, on the mesh's process groups, which may be fake ones.

    Args:
        model: best built under `torch.device("meta")`.
        batch: the arguments of its forward for all ranks: a tuple, or a dict of keywords; meta tensors suffice.
        layouts, batch_dims, precision, stages: as in `distribute`.
        schedule: as in `distribute`, as text; others can be simulated if they place as many stages alike.

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
        layouts: Layouts = None,
        batch_dims: Mapping[str | int, int | None] | None = None,
        precision: Precision | None = None,
        stages: Sequence[str] | int | None = None,
        schedule: str = "1f1b",
    ) -> None:
        local = local_batch(batch, num_batch_shards(mesh), microbatches, batch_dims or {})
        own = copy.deepcopy(model)
        self.distribution = Distribution.of(own, mesh, layouts, microbatches, batch_dims, precision)
        install(self.distribution)
        self.distribution.plan = make_plan(self.distribution, stages, schedule, local)
        (planned,) = self.distribution.planned.values()
        self.stages = planned()

    def memory_policies(self) -> list[MemoryPolicy]:
        """The policies to choose from, roughly the fastest first."""
        z = self.distribution.mesh.z
        storages = storage_choices(AUTO, AUTO, self.distribution.microbatches, z)
        # Without z nothing is gathered, so there is nothing to gather again.
        remats = [remat for remat in _REMATS if z > 1 or remat.gathered_bytes]
        return [MemoryPolicy(remat, storage) for remat, storage in product(remats, storages)]

    def divide(self, schedule: str, policy: MemoryPolicy, overlap: Overlap = _OVERLAP) -> DividedStep:
        """The step with the schedule of that name."""
        chosen = choose_schedule(schedule, self._costs, self.distribution.mesh.pipe, self.distribution.microbatches)
        programs = lower(chosen, self._pipeline.edges, lookahead_on(self.distribution.mesh))
        graphs = [
            divide_stage(stage, local, self.distribution, chosen, policy.storage, policy.remat, overlap)
            for stage, local in zip(self.stages, self._local, strict=True)
        ]
        memory = {each.index: each.memory for each in graphs}
        peaks = peak_memory(programs, chosen, self._pipeline.edges, memory)
        return DividedStep(schedule, policy, programs, graphs, peaks, overlap)

    def estimate(self, step: DividedStep, fuse: Fuse = True, *, knows_hosts: bool = True) -> Estimate:
        """The estimate of a step of this model.

        `knows_hosts`: whether times depend on how the axes of the mesh are placed on hosts.
        """
        return self.simulate(step, fuse, knows_hosts=knows_hosts).estimate

    def simulate(self, step: DividedStep, fuse: Fuse = True, *, knows_hosts: bool = True) -> SimulatedStep:
        """The same step with its final graphs; see `estimate`."""
        mesh = self.distribution.mesh
        prices = prices_of(mesh) if knows_hosts else agnostic_prices_of(mesh)
        model = GraphModel(mesh, prices)
        graphs = compile_stages(step.graphs, model, fuse, step.overlap)
        stages = [estimate_stage(each, model) for each in graphs]
        costs = replace(self._costs, compute_us={index: stage.times_us for index, stage in enumerate(stages)})
        actions = [actions_time(program, stages) for program in step.programs]
        parts = step_parts(
            busiest(actions),
            busiest(self._once_of_ranks(stages)),
            simulate(step.programs, costs).makespan_us,
            simulate(step.programs, costs.without_communication()).makespan_us,
        )
        states = [peak.parts["optimizer"] for peak in step.peaks]
        estimate = Estimate(
            replace(self.distribution.final_plan, schedule=step.schedule),
            step.policy.options,
            parts.total_us,
            max(each.compute_us for each in actions),
            step.peak_bytes,
            self._traffic(stages, costs, prices),
            parts,
            optimizer_us(max(states), prices.memory_bytes_per_us),
        )
        return SimulatedStep(step, graphs, stages, estimate)

    def _once_of_ranks(self, stages: Sequence[StageEstimate]) -> list[GraphTime]:
        """For each rank of the pipeline, what its stages run once per step."""
        homes = list(zip(stages, self.distribution.placement, strict=True))
        ranks = range(self.distribution.mesh.pipe)
        return [one_after_another(stage.once for stage, home in homes if home == rank) for rank in ranks]

    @cached_property
    def _costs(self) -> Costs:
        return estimate_costs(self.stages, self._pipeline, self.distribution.mesh, self.distribution.placement)

    @cached_property
    def _pipeline(self) -> Pipeline:
        return join_stages(self.stages, self.distribution, "broadcast", "balance", PassLog())

    @cached_property
    def _local(self) -> list[JointGraph]:
        """The local graph of each stage, on the first of its ranks: it has the largest shards."""
        mesh, placement = self.distribution.mesh, self.distribution.placement
        ranks = [mesh.rank_at({"pipe": pipe}) for pipe in placement]
        return [localize(stage.joint, replace(mesh, rank=rank)) for stage, rank in zip(self.stages, ranks, strict=True)]

    def _traffic(self, stages: Sequence[StageEstimate], costs: Costs, prices: Prices) -> dict[str, Traffic]:
        of_stages = [stage.traffic(self.distribution.microbatches) for stage in stages]
        axes = {axis for traffic in of_stages for axis, of_axis in traffic.items() if of_axis.num_collectives}
        found = {
            axis: max((traffic.get(axis, Traffic()) for traffic in of_stages), key=lambda each: each.time_us)
            for axis in sorted(axes)
        }
        return found | self._between_stages(costs, prices)

    def _between_stages(self, costs: Costs, prices: Prices) -> dict[str, Traffic]:
        """The bytes that the busiest host's interface sends between stages, and the time of all transfers."""
        if not costs.transfers:
            return {}
        busy = Counter[str]()
        for cost in costs.transfers.values():
            busy.update({link: us for link, us in cost.busy_us.items() if link.endswith("sends")})
        sent = max(busy.values(), default=0.0) * prices.network.bytes_per_us
        time_us = sum(cost.time_us for cost in costs.transfers.values())
        return {"pipe": Traffic(len(costs.transfers), sent, time_us).times(self.distribution.microbatches)}


def local_batch(
    batch: Sequence[Any] | Mapping[str, Any],
    num_shards: int,
    microbatches: int,
    batch_dims: Mapping[str | int, int | None],
) -> Sequence[Any] | Mapping[str, Any]:
    """The part of the global batch that one of `num_shards` batch shards has.

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
