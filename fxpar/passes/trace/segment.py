"""A piece of a stage's forward as a graph of its own, between two cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import fx

from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.graph.describe import describe_call
from fxpar.ir.capture import example
from fxpar.ir.node_meta import requires_grad
from fxpar.ir.stage import Port, PortKind, StageGraph
from fxpar.passes.trace.cut_layers import describe_value, operations


@dataclass(frozen=True)
class Segment:
    """Consecutive operations of a stage, and what crosses its cuts, as nodes of the stage's graph.

    inputs: the values from outside that it uses, in order of first use.
    outputs: those of its values that are used outside.
    passed: the inputs that require a gradient and are used by later segments, too. The segment returns them, so that
        autograd adds the gradient of those uses to that of its own in the order in which it adds them in one trace.
    buffers: those of the inputs that are buffers.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    passed: tuple[fx.Node, ...]
    buffers: frozenset[fx.Node]

    @cached_property
    def kind(self) -> str:
        """All that a trace depends on, as text: segments of one kind differ in the names of modules and values."""
        names = {node: f"${position}" for position, node in enumerate(self.inputs)}
        names |= {node: f"%{position}" for position, node in enumerate(self.nodes)}
        lines = [f"{names[node]}: {describe_value(node)} {node in self.buffers}" for node in self.inputs]
        lines += [f"{names[node]}: {describe_value(node)} = {describe_call(node, names)}" for node in self.nodes]
        return "\n".join([*lines, *(names[node] for node in (*self.outputs, *self.passed))])

    @property
    def input_ports(self) -> tuple[Port, ...]:
        """The inputs by position; buffers are known as such, since they may change."""
        kinds = [PortKind.BUFFER if node in self.buffers else PortKind.EDGE for node in self.inputs]
        return tuple(Port(kind, str(position)) for position, kind in enumerate(kinds))

    @property
    def output_ports(self) -> tuple[Port, ...]:
        """The outputs by position, then the inputs that are passed on."""
        return tuple(Port(PortKind.RESULT, str(position)) for position in range(len(self.outputs) + len(self.passed)))

    def graph(self, stage: StageGraph) -> StageGraph:
        """The segment as a forward of its own, whose ports are those above."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(_leave(graph, copies[node]) for node in (*self.outputs, *self.passed)))
        return StageGraph(stage.index, lazy_graph_module(stage.module, graph), self.input_ports, self.output_ports)


def _leave(graph: fx.Graph, node: fx.Node) -> fx.Node:
    left = graph.call_function(torch.ops.fxpar.border.default, (node,))
    left.meta["example_value"] = example(node)
    return left


def segments(stage: StageGraph, cuts: Sequence[int], *, with_backward: bool) -> list[Segment]:
    """The stage's operations, cut before those at the positions `cuts`."""
    nodes = operations(stage.module)
    parts = [nodes[start:stop] for start, stop in pairwise([0, *cuts, len(nodes)])]
    number = {node: index for index, part in enumerate(parts) for node in part}
    placeholders = stage.module.graph.find_nodes(op="placeholder")
    buffers = {node for node, port in zip(placeholders, stage.inputs, strict=True) if port.kind is PortKind.BUFFER}
    (output,) = stage.module.graph.find_nodes(op="output")
    (returned,) = output.args
    assert isinstance(returned, tuple | list)
    found = []
    for index, part in enumerate(parts):
        last = {node: max((number.get(user, index) for user in node.users), default=index) for node in part}
        entering = dict.fromkeys(used for node in part for used in node.all_input_nodes if number.get(used) != index)
        leaving = [node for node in part if last[node] > index] if index < len(parts) - 1 else returned
        passed = [
            node
            for node in entering
            if with_backward and requires_grad(node) and any(number.get(user, 0) > index for user in node.users)
        ]
        held = frozenset(buffers.intersection(entering))
        found.append(Segment(tuple(part), tuple(entering), tuple(leaving), tuple(passed), held))
    return found
