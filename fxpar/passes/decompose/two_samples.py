"""A graph that was traced for a batch of one sample as it would be for two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.node_meta import known_value, set_value, tensor
from fxpar.ir.stage import JointGraph, Port

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def for_two_samples(joint: JointGraph, batch_dims: Mapping[Port, int]) -> tuple[JointGraph, dict[fx.Node, fx.Node]]:
    """The same ops on inputs that are twice as long along their batch dims, and the copy of each node.

    In a batch of one sample nothing tells its dim from others of size 1. Sizes that the trace has noted in views are
    adapted; where dims of size 1 are side by side, the batch is the first. The result is to be read: a view of it may
    need a copy.

    Raises:
        RuntimeError, ValueError, TypeError, IndexError: an op takes no operands of the new sizes.
    """
    graph, copies, mode = ConcreteGraph(), dict[fx.Node, fx.Node](), fake_mode_of(joint.module.graph)
    ports = iter(joint.inputs)
    with mode:
        for node in joint.module.graph.nodes:
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                dim = batch_dims.get(next(ports))
                if dim is not None:
                    set_value(copy, _twice_as_long(tensor(node), dim))
            elif callable(copy.target):
                set_value(copy, _value(node, copy, copy.target))
    return replace(joint, module=lazy_graph_module(joint.module, graph)), copies


def _twice_as_long(value: Tensor, dim: int) -> Tensor:
    shape = list(value.shape)
    shape[dim] *= 2
    return value.new_empty(shape)


def _values(given: Any) -> Any:
    return fx.node.map_arg(given, known_value)


def _value(node: fx.Node, copy: fx.Node, target: Callable[..., Any]) -> Any:
    """What `copy` of `node` returns; the sizes among the arguments of views and expansions are adapted."""
    if node.target is aten.expand.default:
        copy.update_arg(1, _expanded(node, copy))
    if node.target not in _VIEWS:
        return target(*_values(copy.args), **_values(copy.kwargs))
    copy.update_arg(1, _viewed(node, copy))
    (operand,) = copy.all_input_nodes
    return tensor(operand).reshape(_viewed(node, copy))  # rows that one sample has in a row may be apart for two


def _expanded(node: fx.Node, copy: fx.Node) -> list[int]:
    sizes, grown = list(tensor(node).shape), _grown_dim(node, copy)
    if grown is not None:
        sizes[grown - tensor(node.all_input_nodes[0]).dim()] = -1
    return sizes


def _viewed(node: fx.Node, copy: fx.Node) -> list[int]:
    sizes, grown = list(tensor(node).shape), _grown_dim(node, copy)
    if grown is not None:
        sizes[_dim_after(sizes, math.prod(tensor(node.all_input_nodes[0]).shape[:grown]))] *= 2
    return sizes


def _grown_dim(node: fx.Node, copy: fx.Node) -> int | None:
    """The dim in which the operand of `copy` is longer than that of `node`."""
    before, now = (tensor(each.all_input_nodes[0]).shape for each in (node, copy))
    return next((dim for dim, (old, new) in enumerate(zip(before, now, strict=True)) if old != new), None)


def _dim_after(sizes: Sequence[int], num_before: int) -> int:
    """The first dim of `sizes` that begins after dims of `num_before` elements, or that covers this place."""
    found = 1
    for dim, size in enumerate(sizes):
        if found == num_before or found * size > num_before:
            return dim
        found *= size
    return len(sizes) - 1
