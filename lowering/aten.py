"""The reference lowering: every ATen op of the graph is called as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import code_of, lazy_graph_module
from fxpar.ir.node_meta import tensor
from fxpar.lowering.cpu_collectives import replace_cpu_collectives
from fxpar.lowering.observed_collectives import with_observed_collectives

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def lower_to_aten(graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """The graph's own Python code, which drops every intermediate value after its last use."""
    return code_of(with_observed_collectives(replace_cpu_collectives(_with_strides_of_views(graph))))


def _with_strides_of_views(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph`, or a copy whose views have the strides of their fake tensors in dims of size 1, too.

    In such dims `aten.view` and `aten.reshape` return other strides for real tensors than for fake ones. Kernels that
    tell channels-last from contiguous by strides then reject inputs that they accepted in the trace: group norm does,
    after the attention over a single image.
    """
    views = {node for node in graph.graph.nodes if _may_differ(node)}
    if not views:
        return graph
    restored = ConcreteGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        copies[node] = restored.node_copy(node, copies.__getitem__)
        if node in views:
            view = tensor(node)
            copies[node] = restored.call_function(with_strides_of_single, (copies[node], view.stride()))
    return lazy_graph_module(graph, restored)


def with_strides_of_single(view: Tensor, strides: Sequence[int]) -> Tensor:
    """`view` with these strides in its dims of size 1; in others it keeps its own, by which its elements are found."""
    own = zip(view.shape, view.stride(), strides, strict=True)
    return view.as_strided(view.shape, [given if size == 1 else stride for size, stride, given in own])


def _may_differ(node: fx.Node) -> bool:
    if node.target not in _VIEWS:
        return False
    view = tensor(node)
    return 1 in view.shape and not view.is_contiguous()
