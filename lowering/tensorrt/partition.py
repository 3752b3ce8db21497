"""Divide a region into pieces for TensorRT engines and pieces between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from fxpar.costs.op_cost import flops_of
from fxpar.errors.base import some_of
from fxpar.ir.op_predicates import is_free_to_recompute
from fxpar.lowering.regions import Region, region_of

SMALLEST_ENGINE = 5
"""Fewer ops, views aside, are no engine; torch-tensorrt's default is the same.

A call of an engine is assumed to cost the host as much as launching a few kernels; values that cross its border cannot
be fused with what is beyond it, and Inductor makes one kernel of a few cheap ops, too. None of this was measured.
"""

Obstacle: TypeAlias = Callable[[fx.Node], str | None]
"""Returns why an op cannot be part of an engine, by its name; None if it can."""


def split_for_engines(region: fx.GraphModule, obstacle: Obstacle) -> list[Region]:
    """The ops of `region` as pieces, each after those whose values it uses; `reason_against` tells which are engines.

    Before: mm, relu, ..., mm, sort, mm, relu, ..., mm
    After:  [mm, relu, ..., mm], [sort], [mm, relu, ..., mm]
    """
    partitioner = CapabilityBasedPartitioner(region, _Convertible(obstacle), allows_single_node_partition=True)
    places = {node: place for place, node in enumerate(region.graph.nodes)}
    proposed = [sorted(partition.nodes, key=places.__getitem__) for partition in partitioner.propose_partitions()]
    proposed.sort(key=lambda nodes: places[nodes[0]])
    engines = [nodes for nodes in proposed if reason_against(nodes, obstacle) is None]
    return [region_of(nodes) for nodes in _in_order(region.graph, engines)]


def reason_against(nodes: Sequence[fx.Node], obstacle: Obstacle) -> str | None:
    """Why these ops are no engine, as text; None if they are one."""
    obstacles = dict.fromkeys(found for node in nodes if (found := obstacle(node)) is not None)
    if obstacles:
        return f"no converter for {some_of(list(obstacles))}"
    num_ops = count_ops(nodes)
    if num_ops < SMALLEST_ENGINE:
        return f"fewer than {SMALLEST_ENGINE} ops"
    if not any(map(flops_of, nodes)):
        return "no matmul, convolution or attention, so that Inductor's fused kernels are as good"
    return None


def count_ops(nodes: Sequence[fx.Node]) -> int:
    """How many of these ops compute something: views do not."""
    return sum(not is_free_to_recompute(node) for node in nodes)


class _Convertible(OperatorSupportBase):
    def __init__(self, obstacle: Obstacle) -> None:
        self._obstacle = obstacle

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and self._obstacle(node) is None


def _in_order(graph: fx.Graph, engines: Sequence[Sequence[fx.Node]]) -> list[Sequence[fx.Node]]:
    """The engines and, in as few pieces as possible, the ops between them, each piece after those that it uses."""
    in_engines = {node for engine in engines for node in engine}
    others = [node for node in graph.nodes if node.op == "call_function" and node not in in_engines]
    waiting = list(engines)
    done = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    pieces: list[Sequence[fx.Node]] = []

    def is_ready(nodes: Sequence[fx.Node]) -> bool:
        known = done.union(nodes)
        return all(source in known for node in nodes for source in node.all_input_nodes)

    while others or waiting:
        between: list[fx.Node] = []
        for node in others:
            if done.issuperset(node.all_input_nodes):
                between.append(node)
                done.add(node)
        ready = [engine for engine in waiting if is_ready(engine)]
        assert between or ready, "engines use each other's values"
        done.update(node for engine in ready for node in engine)
        others = [node for node in others if node not in done]
        waiting = [engine for engine in waiting if engine not in ready]
        pieces += [between, *ready] if between else ready
    return pieces
