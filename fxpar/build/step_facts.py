"""Collect the facts of a step, for dumps: what is equal on all ranks, and what one rank knows of its stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx

from fxpar.build.stage_estimate import StageEstimate, estimate_stage, gradient_reduction
from fxpar.build.step_plan import StepPlan
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.placement import spread
from fxpar.costs.prices import Prices, cluster_of, prices_of
from fxpar.costs.transfer_costs import plan_cost
from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import communication, fused, is_backward, known_placed, known_value, layout_of, module_path
from fxpar.ir.stage import PlannedStage
from fxpar.layouts.repeated_axes import repeated_axes
from fxpar.model.distribution import Distribution
from fxpar.passes.stage_graphs import StageGraphs
from fxpar.report.facts import (
    ONCE,
    VERSION,
    ActionFacts,
    AxisFacts,
    ClusterFacts,
    CollectiveFacts,
    LayoutFacts,
    RankFacts,
    RelayFacts,
    ReplicatedFacts,
    StageFacts,
    StepFacts,
    TransferFacts,
    module_pattern,
)
from fxpar.resharding.pipeline import Reshard
from fxpar.rules import rule_for
from fxpar.world.mesh import Mesh

_MOST_REPLICATED = 40
"""Groups of replicated ops to list for each stage: those that waste most."""


def step_facts(
    distribution: Distribution,
    plan: StepPlan,
    memory_budget: float,
    *,
    profiled: bool = False,
    timeline: Path | None = None,
) -> StepFacts:
    """What all ranks know of the step of `plan`; arguments as in `StepFacts`, with an infinite budget for none."""
    mesh, final = distribution.mesh, distribution.final_plan
    prices = prices_of(mesh)
    return StepFacts(
        VERSION,
        tuple(_axis_facts(mesh, axis, prices) for axis in mesh.sizes),
        mesh.hosts,
        _cluster_facts(mesh),
        final.stages,
        plan.schedule.name,
        str(plan.schedule),
        plan.schedule.num_microbatches,
        profiled,
        None if math.isinf(memory_budget) else memory_budget,
        None if timeline is None else str(timeline.absolute()),
        (*_parameters(distribution), *_results(plan.stages)),
        tuple(_transfer_facts(reshard, prices) for reshard in plan.pipeline.reshards),
    )


def rank_facts(graphs: Sequence[StageGraphs], model: GraphModel, mesh: Mesh) -> RankFacts:
    """What a rank knows of its stages, from the graphs that it is to run."""
    return RankFacts(VERSION, tuple(_stage_facts(each, model, mesh) for each in graphs))


def _axis_facts(mesh: Mesh, axis: str, prices: Prices) -> AxisFacts:
    over = spread(mesh, axis)
    if axis in prices.links:
        latency_us, bytes_per_us = prices.links[axis].latency_us, prices.links[axis].bytes_per_us
    else:  # stages do not run collectives, but send messages
        network = prices.network if over.rings_per_host else prices.inside
        latency_us, bytes_per_us = network.chunk_us, network.bytes_per_us
    return AxisFacts(axis, over.size, over.num_hosts, over.rings_per_host, latency_us, bytes_per_us)


def _cluster_facts(mesh: Mesh) -> ClusterFacts:
    cluster = cluster_of(mesh)
    return ClusterFacts(
        cluster.name,
        cluster.ranks_per_host,
        cluster.intra_bytes_per_us,
        cluster.host_bytes_per_us,
        cluster.memory_bytes,
    )


def _parameters(distribution: Distribution) -> Iterator[LayoutFacts]:
    for name, planned in distribution.final_plan.parameters.items():
        dtype = distribution.parameters[name].dtype
        yield _layout_facts(name, "parameter", planned.stage, dtype, planned.layout)


def _results(stages: Iterable[PlannedStage]) -> Iterator[LayoutFacts]:
    """The last result of each module in the forward, which is what it returns."""
    for stage in stages:
        last: dict[str, tuple[torch.dtype, Layout]] = {}
        for node in stage.joint.module.graph.nodes:
            layout, found = layout_of(node), known_value(node)
            if layout is not None and isinstance(found, Tensor) and not is_backward(node):
                last[module_path(node)] = found.dtype, layout
        for path, (dtype, layout) in last.items():
            yield _layout_facts(path, "result", stage.joint.index, dtype, layout)


def _layout_facts(name: str, kind: str, stage: int, dtype: torch.dtype, layout: Layout) -> LayoutFacts:
    first = defaultdict[str, int](int)  # the first rank along an axis has the largest piece
    whole, piece = math.prod(layout.shape), math.prod(layout.local_shape(first))
    text, size = str(dtype).removeprefix("torch."), dtype.itemsize
    return LayoutFacts(name, kind, stage, text, layout.shape, str(layout), whole * size, piece * size)


def _transfer_facts(reshard: Reshard, prices: Prices) -> TransferFacts:
    crossing, plan = reshard.crossing, reshard.plan
    relays = (
        RelayFacts(
            each.task,
            each.num_elements * plan.itemsize,
            each.path,
            tuple(map(tuple, each.readers)),
            each.begin,
            each.end,
        )
        for each in plan.relays
    )
    return TransferFacts(
        crossing.name,
        crossing.source,
        crossing.targets,
        crossing.is_gradient,
        crossing.is_of_parameter,
        str(crossing.source_layout),
        tuple(map(str, crossing.target_layouts)),
        plan.strategy,
        plan.num_bytes,
        plan.makespan_bytes,
        math.ceil(plan.bound_bytes),
        plan_cost(plan, prices.network, prices.inside).time_us,
        tuple(relays),
    )


def _stage_facts(graphs: StageGraphs, model: GraphModel, mesh: Mesh) -> StageFacts:
    estimate = estimate_stage(graphs, model)
    verdicts = {verdict.fused or verdict.collective: verdict.text for of in graphs.verdicts.values() for verdict in of}
    collectives = [
        facts
        for kind, module in graphs.of_actions.items()
        for facts in _collectives(kind, module, estimate.actions[kind].waited_us, verdicts, model)
    ]
    for module in graphs.of_step.values():
        collectives += _collectives(ONCE, module, {}, verdicts, model)
    actions: dict[str, ActionFacts] = {
        kind: ActionFacts(time.total_us, time.compute_us) for kind, time in estimate.actions.items()
    }
    return StageFacts(
        graphs.index,
        actions,
        estimate.once.total_us,
        (*collectives, *_gradient_sums(graphs, model)),
        tuple(_replicated(graphs, estimate, model, mesh)),
    )


def _collectives(
    graph: str, module: fx.GraphModule, waited_us: Mapping[str, float], verdicts: Mapping[str, str], model: GraphModel
) -> Iterator[CollectiveFacts]:
    """The collectives of a graph; one that nothing waits for in it is exposed as a whole."""
    for node in module.graph.nodes:
        done = communication(node) or fused(node)
        if done is None or not (traffic := model.traffic(done)).num_collectives:
            continue
        yield CollectiveFacts(
            graph,
            node.name,
            done.kind,
            done.axis,
            module_path(node),
            1,
            done.num_bytes,
            traffic.bytes_sent,
            traffic.time_us,
            waited_us.get(node.name, traffic.time_us),
            None if fused(node) is None else _op(node),
            verdicts.get(node.name, ""),
        )


def _gradient_sums(graphs: StageGraphs, model: GraphModel) -> Iterator[CollectiveFacts]:
    """The all-reduces of gradients after the last microbatch."""
    for axis, traffic in gradient_reduction(graphs, model).traffic.items():
        if traffic.num_collectives:
            yield CollectiveFacts(
                ONCE,
                f"gradients over {axis}",
                "all_reduce",
                axis,
                "",
                traffic.num_collectives,
                0,
                traffic.bytes_sent,
                traffic.time_us,
                traffic.time_us,
                None,
                "runs after the last microbatch",
            )


def _replicated(
    graphs: StageGraphs, estimate: StageEstimate, model: GraphModel, mesh: Mesh
) -> Iterator[ReplicatedFacts]:
    """The ops that ranks along y or x repeat, grouped, the most wasteful first."""
    times: defaultdict[tuple[str, str, tuple[str, ...], bool], list[float]] = defaultdict(list)
    for kind in estimate.kinds_of_microbatch:
        for node in graphs.of_actions[kind].graph.nodes:
            axes = _repeated_axes(node, mesh)
            if axes and (time_us := model.compute_us(node)):
                key = _op(node), module_pattern(module_path(node)), axes, rule_for(node.target) is not None
                times[key].append(time_us)
    found = [
        ReplicatedFacts(op, module, len(each), axes, has_rule, sum(each), sum(each) * (1 - 1 / _num_ranks(mesh, axes)))
        for (op, module, axes, has_rule), each in times.items()
    ]
    yield from sorted(found, key=lambda facts: -facts.wasted_us)[:_MOST_REPLICATED]


def _op(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _repeated_axes(node: fx.Node, mesh: Mesh) -> tuple[str, ...]:
    """The axes of tensor parallelism whose ranks all call the op of `node` on the same values."""
    found = known_placed(node)
    return () if node.op != "call_function" or found is None else repeated_axes(found, mesh)


def _num_ranks(mesh: Mesh, axes: Iterable[str]) -> int:
    return math.prod(mesh.sizes[axis] for axis in axes)
