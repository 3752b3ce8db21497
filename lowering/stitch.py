"""Compile every distinct region of a graph once, and replace the graph by calls of the compiled regions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.ir.node_meta import set_value, value
from fxpar.lowering.regions import Region, split_regions

Compiled: TypeAlias = Callable[[list[Tensor]], Sequence[Any]]
"""Code for a graph. It takes its arguments in a list and empties it, so that each is freed after its last use."""


@dataclass(frozen=True, slots=True)
class _Code:
    """The code of all regions with one signature: `function` returns the values at `outputs` of a region's nodes."""

    function: Compiled
    outputs: tuple[int, ...]


def stitch_regions(graph: fx.GraphModule, compile_region: Callable[[fx.GraphModule], Compiled]) -> fx.GraphModule:
    """`graph` with its regions replaced by calls of compiled code; `compile_region` is called once per distinct one.

    Before: embedding, add, [layer_norm, mm, ..., add], [layer_norm, mm, ..., add]
    After:  region_0([...]), region_1([...]), region_1([...]), after two calls of `compile_region`
    """
    return stitch(graph, split_regions(graph.graph), compile_region)


def stitch(
    graph: fx.GraphModule, regions: Sequence[Region], compile_region: Callable[[fx.GraphModule], Compiled]
) -> fx.GraphModule:
    """As `stitch_regions`, with these regions, which hold all ops of the graph, each after those that it uses."""
    groups: dict[str, list[Region]] = {}
    signed = [(region, region.signature) for region in regions]
    for region, signature in signed:
        if not (region.communicates or region.is_free):
            groups.setdefault(signature, []).append(region)
    codes = {
        signature: _compile_group(f"region_{index}", group, compile_region)
        for index, (signature, group) in enumerate(groups.items())
    }
    stitched = _Stitched(graph)
    for region, signature in signed:
        if signature in codes:
            stitched.call(codes[signature], region)
        elif region.communicates:
            stitched.copy(region)
    return stitched.finish()


def _compile_group(name: str, group: Sequence[Region], compile_region: Callable[[fx.GraphModule], Compiled]) -> _Code:
    """Compile equal regions. The graph may use different values of each: the code returns the union of outputs."""
    outputs = tuple(sorted(set[int]().union(*(region.outputs for region in group))))
    compiled = compile_region(_region_graph(group[0], outputs))

    def function(box: list[Tensor]) -> Sequence[Any]:
        return compiled(box)

    function.__name__ = name  # by which the stitched graph's code calls it
    return _Code(function, outputs)


def _region_graph(region: Region, outputs: Sequence[int]) -> fx.GraphModule:
    """The region as a separate graph. Names depend on its ops alone, so that equal regions have equal graphs."""
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(region.inputs):
        own[node] = graph.placeholder(f"input_{index}")
        set_value(own[node], value(node))
    for node in region.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), own.__getitem__)
        assert callable(node.target), f"{node} calls no function"
        own[node] = graph.call_function(node.target, args, kwargs)
        set_value(own[node], value(node))
    graph.output(tuple(own[region.nodes[index]] for index in outputs))
    return fx.GraphModule({}, graph)


class _Stitched:
    """The graph of calls, under construction."""

    def __init__(self, source: fx.GraphModule) -> None:
        self._source = source
        self._graph = ConcreteGraph()
        self._values: dict[fx.Node, fx.Node] = {}
        for node in source.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._values[node] = self._graph.node_copy(node)

    def call(self, code: _Code, region: Region) -> None:
        """Append a call of `code` for `region`."""
        inputs = tuple(map(self._value, region.inputs))
        box = self._graph.create_node("call_function", _box, inputs, name="box")
        results = self._graph.create_node("call_function", code.function, (box,), name="results")
        for place, index in enumerate(code.outputs):
            if index in region.outputs:
                self._values[region.nodes[index]] = self._graph.call_function(operator.getitem, (results, place))

    def copy(self, region: Region) -> None:
        """Append the ops of `region` as they are."""
        for node in region.nodes:
            self._value(node)

    def finish(self) -> fx.GraphModule:
        """The whole graph, which returns what the source returns."""
        self._graph.output(fx.map_arg(self._source.graph.output_node().args[0], self._value))
        return lazy_graph_module(self._source, self._graph)

    def _value(self, node: fx.Node) -> fx.Node:
        """The stitched graph's node for `node` of the source: a region's output, or a copied view of one."""
        if node not in self._values:
            self._values[node] = self._graph.node_copy(node, self._value)
        return self._values[node]


def _box(*tensors: Tensor) -> list[Tensor]:
    """The arguments as a list, which compiled code empties; the stitched code drops its own references to them."""
    return list(tensors)
