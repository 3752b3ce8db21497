"""The reference lowering: every ATen op of the graph is called as it is."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import code_of, lazy_graph_module
from fxpar.ir.node_meta import communication, tensor
from fxpar.lowering.cpu_collectives import replace_cpu_collectives
from fxpar.lowering.observed_collectives import with_observed_collectives

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def lower_to_aten(graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """The graph's own Python code, which drops every intermediate value after its last use."""
    return code_of(with_observed_collectives(replace_cpu_collectives(_with_planned_strides(graph))))


def _with_planned_strides(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph`, or a copy in which strides are those of the fake tensors wherever they matter.

    In dims of size 1 `aten.view` and `aten.reshape` return other strides for real tensors than for fake ones. Kernels
    that tell channels-last from contiguous by strides then reject inputs that they accepted in the trace: group norm
    does, after the attention over a single image.

    Other kernels keep an order of dims that their fake tensors do not, or the reverse, as paddings of channels-last
    volumes. So a value is laid out as planned before what takes its memory for that: a view, and a collective.
    """
    nodes = list(graph.graph.nodes)
    if not any(_may_differ(node) or _reads_memory(node) for node in nodes):
        return graph
    restored = ConcreteGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        laid_out: dict[fx.Node, fx.Node] = {}
        if _reads_memory(node):
            value = node.all_input_nodes[0]
            laid_out[value] = restored.call_function(with_strides, (copies[value], tensor(value).stride()))
        copies[node] = restored.node_copy(node, ChainMap(laid_out, copies).__getitem__)
        if _may_differ(node):
            copies[node] = restored.call_function(with_strides_of_single, (copies[node], tensor(node).stride()))
    return lazy_graph_module(graph, restored)


def _reads_memory(node: fx.Node) -> bool:
    """Whether an operation takes its operand's memory to be laid out as planned."""
    return node.target in (aten.view.default, aten._unsafe_view.default, aten.as_strided.default) or (
        communication(node) is not None
    )


def with_strides(value: Tensor, strides: Sequence[int]) -> Tensor:
    """`value` with these strides in dims that have any: a copy, unless it has them."""
    if value.stride() == strides or all(
        own == given for size, own, given in zip(value.shape, value.stride(), strides, strict=True) if size != 1
    ):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def with_strides_of_single(view: Tensor, strides: Sequence[int]) -> Tensor:
    """`view` with these strides in its dims of size 1; in others it keeps its own, by which its elements are found."""
    own = zip(view.shape, view.stride(), strides, strict=True)
    return view.as_strided(view.shape, [given if size == 1 else stride for size, stride, given in own])


def _may_differ(node: fx.Node) -> bool:
    if node.target not in _VIEWS:
        return False
    view = tensor(node)
    return 1 in view.shape and not view.is_contiguous()
