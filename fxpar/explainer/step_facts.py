"""Facts about a simulated step: its stages, the memory of ranks, collectives by layer, and work that ranks repeat."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from fxpar.costs.dataflow import Operation, operations
from fxpar.costs.graph_time import GraphModel, Traffic
from fxpar.costs.op_cost import work_us
from fxpar.costs.placement import spread
from fxpar.costs.prices import Prices, prices_of
from fxpar.ir.node_meta import communication, fused, known_placed, layer_path, module_path
from fxpar.ir.stage import PlannedStage
from fxpar.layouts.repeated_axes import repeated_axes
from fxpar.model.distribution import Distribution
from fxpar.planner.step_model import SimulatedStep, StepModel
from fxpar.report.facts import module_pattern
from fxpar.schedule.memory import PARTS
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage and the graphs of one microbatch on one of its ranks.

    opened_by: the module that it starts with; "" for the first stage.
    num_parameters, parameter_bytes: of the parameters that it owns, in all and on each rank.
    forward_us, backward_us, exposed_us: of one microbatch; the last is in the others.
    once_us: gathers of weights and reductions of gradients that run once per step.
    """

    stage: int
    pipe_rank: int
    opened_by: str
    num_parameters: int
    parameter_bytes: int
    forward_us: float
    backward_us: float
    exposed_us: float
    once_us: float


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The peak memory of ranks with the same stages, in bytes, and what it is used for, as in `RankMemory`."""

    pipe_rank: int
    peak_bytes: int
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AxisFacts:
    """An axis of the mesh with several ranks, and the traffic along it in a step.

    num_hosts: of the ranks of one group along it; with one, it does not leave hosts.
    exposed_us: in which nothing is computed for want of it.
    """

    axis: str
    size: int
    num_hosts: int
    traffic: Traffic
    exposed_us: float


@dataclass(frozen=True, slots=True)
class LayerCollectives:
    """Collectives of one kind along one axis that each of some layers starts for every microbatch.

    first, last: paths of consecutive layers that all start as many, with as many bytes; "" is what is in no layer.
    traffic: of one layer, for one microbatch.
    """

    first: str
    last: str
    num_layers: int
    kind: str
    axis: str
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """What all ranks along some axes compute alike, since nothing of it is sharded over them.

    modules: a path, with `*` for the numbers of layers.
    wasted_us: how much less a rank would compute in a step if it were sharded evenly.
    """

    modules: str
    axes: tuple[str, ...]
    wasted_us: float


def stage_facts(model: StepModel, step: SimulatedStep) -> list[StageFacts]:
    """The stages, in order."""
    placement, plan = model.distribution.placement, model.distribution.final_plan
    openers = ("", *plan.stages)
    found = []
    for index, stage in enumerate(step.stages):
        forward, *backward = stage.microbatch
        own = [name for name, parameter in plan.parameters.items() if parameter.stage == index]
        found.append(
            StageFacts(
                index,
                placement[index],
                openers[index],
                sum(math.prod(plan.parameters[name].layout.shape) for name in own),
                sum(_local_bytes(name, model.distribution, placement[index]) for name in own),
                forward.total_us,
                sum(each.total_us for each in backward),
                sum(each.exposed_us for each in stage.microbatch),
                stage.once.total_us,
            )
        )
    return found


def _local_bytes(name: str, distribution: Distribution, pipe: int) -> int:
    """Of a parameter, on the first rank of its stage, which has the largest shard."""
    mesh, layout = distribution.mesh, distribution.final_plan.parameters[name].layout
    shape = layout.local_shape(mesh.coordinate_of(mesh.rank_at({"pipe": pipe})))
    return math.prod(shape) * distribution.parameters[name].dtype.itemsize


def rank_facts(step: SimulatedStep) -> list[RankFacts]:
    """The memory of each rank of the pipe axis."""
    return [
        RankFacts(peak.rank, peak.peak_bytes, {kind: peak.parts[kind] for kind in PARTS}) for peak in step.divided.peaks
    ]


def axis_facts(mesh: Mesh, step: SimulatedStep) -> list[AxisFacts]:
    """The axes with several ranks, outermost first."""
    estimate = step.estimate
    return [
        AxisFacts(
            axis,
            size,
            spread(mesh, axis).num_hosts,
            estimate.traffic.get(axis, Traffic()),
            estimate.parts.exposed_us.get(axis, 0.0),
        )
        for axis, size in mesh.sizes.items()
        if size > 1
    ]


def layer_collectives(mesh: Mesh, step: SimulatedStep) -> list[LayerCollectives]:
    """Collectives of one microbatch, by layer; those of consecutive layers that are equal are one item."""
    model = GraphModel(mesh, prices_of(mesh))
    by_layer: dict[str, dict[tuple[str, str], Traffic]] = {}
    for graphs, stage in zip(step.graphs, step.stages, strict=True):
        for action in stage.kinds_of_microbatch:
            for layer, kind, axis, traffic in _collectives(graphs.of_actions[action], model):
                of_layer = by_layer.setdefault(layer, {})
                of_layer[kind, axis] = of_layer.get((kind, axis), Traffic()) + traffic
    found = []
    for _, equal in groupby(by_layer.items(), key=lambda item: (_list_of(item[0]), sorted(item[1].items(), key=str))):
        layers = list(equal)
        (first, collectives), (last, _) = layers[0], layers[-1]
        for (kind, axis), traffic in collectives.items():
            found.append(LayerCollectives(first, last, len(layers), kind, axis, traffic))
    return found


def _collectives(module: fx.GraphModule, model: GraphModel) -> Iterator[tuple[str, str, str, Traffic]]:
    """Layer, kind, axis and traffic of each collective."""
    for node in module.graph.nodes:
        done = communication(node) or fused(node)
        if done is not None:
            yield layer_path(module_path(node)) or "", done.kind, done.axis, model.traffic(done)


def _list_of(layer: str) -> str:
    return layer.rpartition(".")[0]


def repeated_work(stages: Sequence[PlannedStage], distribution: Distribution) -> list[RepeatedWork]:
    """What ranks compute alike, the most expensive first, of the pipe rank that repeats most."""
    by_rank: defaultdict[int, defaultdict[tuple[str, tuple[str, ...]], float]] = defaultdict(lambda: defaultdict(float))
    mesh, microbatches = distribution.mesh, distribution.microbatches
    prices = prices_of(mesh)
    for stage, rank in zip(stages, distribution.placement, strict=True):
        for op in operations(stage.joint):
            axes = _repeated_axes(op, mesh)
            if axes:
                parts = math.prod(mesh.sizes[axis] for axis in axes)
                wasted_us = _local_us(op, mesh, prices) * (1 - 1 / parts) * microbatches
                by_rank[rank][module_pattern(module_path(op.node)), axes] += wasted_us
    if not by_rank:
        return []
    worst = max(by_rank.values(), key=lambda found: sum(found.values()))
    found = [RepeatedWork(modules, axes, wasted_us) for (modules, axes), wasted_us in worst.items() if wasted_us > 0]
    return sorted(found, key=lambda each: -each.wasted_us)


def _repeated_axes(op: Operation, mesh: Mesh) -> tuple[str, ...]:
    """The axes of tensor parallelism over which neither operands nor results of an op are divided."""
    placed = known_placed(op.node)
    return () if op.call is None or op.is_view or placed is None else repeated_axes(placed, mesh)


def _local_us(op: Operation, mesh: Mesh, prices: Prices) -> float:
    """The time of an op on one rank, which computes an even share."""
    placed = known_placed(op.node)
    assert placed is not None, "it is known where the axes are"
    used = {axis for layout in (*placed.inputs, *placed.outputs) if layout is not None for axis, _ in layout.axes}
    return work_us(op, prices) / math.prod(mesh.sizes[axis] for axis in used)
