"""What a training step comes to on a mesh of ranks that need not exist: time, memory, and communication by axis."""

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

from fxpar.compiler import StageGraphs, divide_stage, join_stages, localize, overlap_stage
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
from fxpar.pipeline import Pipeline
from fxpar.plan import Plan
from fxpar.planner.graph_time import GraphModel, Traffic
from fxpar.planner.prices import agnostic_prices_of, prices_of
from fxpar.planner.remat import POLICIES, Remat
from fxpar.planner.stage_model import StageEstimate, estimate_stage
from fxpar.planner.stage_times import estimate_costs
from fxpar.planner.storage import AUTO, MICROBATCH, STEP, Storage, storage_choices
from fxpar.schedule import Costs, Program, Schedule, lower, peak_memory, simulate
from fxpar.stage import JointGraph

_NO_DUMP = Dump(None, 0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step comes to.

    plan, options: by which `distribute` and `torch.compile` make it so.
    step_us: from start to end, pipeline, waits and reductions included.
    compute_us: what the busiest rank computes.
    peak_bytes: of the fullest rank, with gradients and the states of the optimizer.
    traffic: by axis, of the rank that communicates longest along it; messages between stages count as "pipe".
    """

    plan: Plan
    options: Mapping[str, str]
    step_us: float
    compute_us: float
    peak_bytes: int
    traffic: Mapping[str, Traffic]


@dataclass(frozen=True, slots=True)
class _Divided:
    """The graphs of all stages, the options that make them so, and what the fullest rank takes with them."""

    graphs: Sequence[StageGraphs]
    options: Mapping[str, str]
    peak_bytes: int


class StepModel:
    """The step of a model on `mesh`, whose stages are as many as its pipe ranks; nothing of the model is changed.

    Its graphs are made as they would be to run, on the mesh's process groups, which may be imagined ones.

    Args:
        model: best built under `torch.device("meta")`.
        batch: the arguments of its forward for all ranks together: a tuple, or a dict of keywords; meta tensors do.
        layouts, batch_dims: as of `distribute`.
        knows_hosts: whether times go by where the axes of the mesh lie on hosts.

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
        *,
        knows_hosts: bool = True,
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
        self._prices = prices_of(mesh) if knows_hosts else agnostic_prices_of(mesh)
        self._model = GraphModel(mesh, self._prices)

    def estimate(
        self,
        schedule: str,
        budget_bytes: float = math.inf,
        policies: Sequence[str] = POLICIES,
        overlap: Overlap | None = None,
    ) -> Estimate:
        """The step by the schedule of that name, with one stage on each rank.

        Of the ways to handle what is stored in shards, and then of the `policies` by which values are computed again,
        it is the first that fits into `budget_bytes`, else the last.
        """
        mesh, microbatches = self._distribution.mesh, self._distribution.microbatches
        costs = estimate_costs(self._stages, self._pipeline, mesh, self._distribution.placement)
        chosen = choose_schedule(schedule, costs, mesh, microbatches)
        programs = lower(chosen, self._pipeline.edges)
        choices = product(policies, storage_choices(AUTO, AUTO, microbatches, mesh.z))
        divided = self._first_that_fits(
            chosen, programs, [(Remat(policy), way) for policy, way in choices], budget_bytes
        )
        stages = [
            estimate_stage(overlap_stage(each, overlap or Overlap(), _NO_DUMP), self._model) for each in divided.graphs
        ]
        costs = replace(costs, compute_us={index: stage.times_us for index, stage in enumerate(stages)})
        return Estimate(
            replace(self._distribution.final_plan, schedule=schedule),
            divided.options,
            simulate(programs, costs).makespan_us + max(stage.once.total_us for stage in stages),
            max(stage.compute_us(microbatches) for stage in stages),
            divided.peak_bytes,
            self._traffic(stages, costs),
        )

    @cached_property
    def _pipeline(self) -> Pipeline:
        return join_stages(self._stages, self._distribution, "broadcast", "balance", _NO_DUMP)

    @cached_property
    def _local(self) -> list[JointGraph]:
        """The local graph of each stage, on the first of its ranks: it has the largest pieces."""
        mesh, placement = self._distribution.mesh, self._distribution.placement
        ranks = [mesh.rank_at({"pipe": pipe}) for pipe in placement]
        return [
            localize(stage.joint, replace(mesh, rank=rank)) for stage, rank in zip(self._stages, ranks, strict=True)
        ]

    def _first_that_fits(
        self,
        schedule: Schedule,
        programs: Sequence[Program],
        choices: Sequence[tuple[Remat, Storage]],
        budget_bytes: float,
    ) -> _Divided:
        """The stages' graphs by the first of the choices with which every rank fits, else by the last."""
        for number, (remat, storage) in enumerate(choices, start=1):
            graphs = [
                divide_stage(stage, local, self._distribution, schedule, storage, remat)
                for stage, local in zip(self._stages, self._local, strict=True)
            ]
            memory = {each.planned.joint.index: each.memory for each in graphs}
            peaks = peak_memory(programs, schedule, self._pipeline.edges, memory)
            found = _Divided(graphs, _options(remat, storage), max(peak.peak_bytes for peak in peaks))
            if found.peak_bytes <= budget_bytes or number == len(choices):
                return found
        raise AssertionError("there is always a choice")

    def _traffic(self, stages: Sequence[StageEstimate], costs: Costs) -> dict[str, Traffic]:
        of_stages = [stage.traffic(self._distribution.microbatches) for stage in stages]
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


def _options(remat: Remat, storage: Storage) -> dict[str, str]:
    return {
        "remat": remat.policy,
        "gather_weights": STEP if storage.gathers_once else MICROBATCH,
        "reduce_gradients": STEP if storage.reduces_once else MICROBATCH,
    }


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
