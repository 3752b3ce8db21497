"""Which values of a graph Inductor computes inside the kernels that use them, so that they are never in memory."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxpar.ir.node_meta import value
from fxpar.ir.op_predicates import is_free_to_recompute, is_pointwise

aten = torch.ops.aten

_MOST_READS = 4
"""A value with several users that reads more buffers than this is stored in memory (`realize_reads_threshold`)."""

_ELEMENTWISE = frozenset(
    (
        aten.clone.default,
        aten._to_copy.default,
        aten.gelu_backward.default,
        aten.threshold_backward.default,
        aten.silu_backward.default,
        aten.tanh_backward.default,
        aten.sigmoid_backward.default,
        aten.native_dropout_backward.default,
        aten.constant_pad_nd.default,
    )
)
"""In addition to those that PyTorch tags as pointwise."""

_LOOPS = frozenset(
    (
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.amax.default,
        aten.var_mean.correction,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
    )
)
"""Ops that elementwise ones are fused into, but whose own results are stored in memory."""

_EXPENSIVE = frozenset((aten.exp.default, aten.sigmoid.default))
"""Computed once where there are several users."""


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed from one element of each operand."""
    return is_pointwise(node.target) or node.target in _ELEMENTWISE


def fused_away(graph: fx.Graph) -> frozenset[fx.Node]:
    """The elementwise values that only other generated loops use, by Inductor's own rules as of torch 2.13.

    The estimate ignores the borders of regions that are compiled separately. A reduction's result, which might be fused
    as well, counts as in memory.
    """
    away: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if not is_elementwise(node) or not isinstance(value(node), Tensor):
            continue
        users = _users(node)
        reads = frozenset(read for operand in node.all_input_nodes for read in away.get(operand, {operand}))
        shared = len(users) > 1 and (len(reads) > _MOST_READS or node.target in _EXPENSIVE)
        if users and not shared and all(is_elementwise(user) or user.target in _LOOPS for user in users):
            away[node] = reads
    return frozenset(away)


def _users(node: fx.Node) -> list[fx.Node]:
    """The users of a value and of its views, without the views."""
    return [each for user in node.users for each in (_users(user) if is_free_to_recompute(user) else [user])]
