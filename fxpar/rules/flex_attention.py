"""The rule of flex attention, forward and backward: batch and heads may be sharded, queries and keys are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.ir import node_meta
from fxpar.ir.flex_attention import FlexCall
from fxpar.ir.layout import Digit, Shard
from fxpar.rules.einsum import Einsum, Pattern, pattern
from fxpar.rules.rule import LocalOp, OpCall, Operand, Shape, Strategy

aten = torch.ops.aten

_KEY_ORDER = 12
"""In a block mask: an order of keys as a tensor of any shape; the tensors before it have dims of batch and heads."""


class FlexAttentionRule:
    """Shards batch and heads alike in all operands that have them; what the graphs read is replicated.

    The graphs of a rank map its indices of batch and head to logical ones. Ranks compute terms of the gradients of
    what the graphs read, and of keys and values that all heads, or all rows, share.
    """

    def extend(self, call: OpCall, operand: Operand, shard: Shard) -> Strategy | None:
        """See `Rule.extend`."""
        blocks = _block_mask(call)
        has_order = any(isinstance(each, fx.Node) for each in blocks[_KEY_ORDER:])
        return None if has_order else _notation(call, blocks).strategy(call, operand, shard)

    def linear(self, call: OpCall) -> Sequence[Strategy]:
        """See `Rule.linear`."""
        return ()

    def emit(self, local: LocalOp) -> fx.Node:
        """See `Rule.emit`."""
        call = local.call.target
        assert isinstance(call, FlexCall), f"{call} is no flex attention"
        *scores, mask = call.graphs
        graphs = [_at_logical_indices(graph, 1, local) for graph in scores]
        return local.emit(FlexCall((*graphs, _at_logical_indices(mask, 0, local)), call.kind), *local.args)


FLEX_ATTENTION = FlexAttentionRule()


def _block_mask(call: OpCall) -> Sequence[Any]:
    blocks: Sequence[Any] = call.args[-5]
    return blocks


def _notation(call: OpCall, blocks: Sequence[Any]) -> Einsum:
    query, key = call.inputs[:2]
    rows, keys, statistics = pattern("b h S D"), _shared(key, query, "b h T D"), pattern("b h S")
    operands, results = [rows, keys, keys], [rows, statistics, statistics]
    if len(call.args) > 8:  # a backward takes what a forward returns, and gradients of that
        given = zip(call.args[3:7], (rows, statistics, rows, statistics), strict=True)
        operands += [found for value, found in given if isinstance(value, fx.Node)]
        results = [rows, keys, keys, *(None if shape is None else (None,) * len(shape) for shape in call.outputs[3:])]
    shapes = [tuple(node_meta.tensor(block).shape) for block in blocks if isinstance(block, fx.Node)]
    operands += [_shared(shape, query, "b h" + " Z" * (len(shape) - 2)) if len(shape) > 2 else None for shape in shapes]
    read: list[Pattern] = [None] * (len(call.inputs) - len(operands))
    return Einsum((*operands, *read), tuple(results))


def _shared(shape: Shape, query: Shape, text: str) -> Pattern:
    """The dims `text`, where those of one row or head are broadcast to those of the queries."""
    dims = pattern(text)
    assert dims is not None
    return tuple(
        None if place < 2 and size == 1 != query[place] else dim
        for place, (dim, size) in enumerate(zip(dims, shape, strict=True))
    )


def _at_logical_indices(module: fx.GraphModule, first: int, local: LocalOp) -> fx.GraphModule:
    """The graph for a rank whose placeholders `first` and the next are the local indices of batch and head."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for node in placeholders:
        copies[node] = graph.node_copy(node)
    for dim, node in enumerate(placeholders[first : first + 2]):
        if node.users:
            copies[node] = _logical_index(graph, copies[node], local.inputs[0].digits(dim), local.coordinate)
    for node in module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _logical_index(graph: fx.Graph, index: fx.Node, digits: Sequence[Digit], coordinate: Mapping[str, int]) -> fx.Node:
    """The index in a whole dim of what a rank has at `index`: its digits are this rank's, and those of `index`."""
    found: fx.Node | None = None
    offset, stride, rest = 0, 1, index
    for place, digit in reversed(list(enumerate(digits))):
        if digit.axis is not None:
            offset += coordinate[digit.axis] * stride
        else:
            is_first = all(other.axis is not None for other in digits[:place])
            value = rest if is_first else graph.call_function(aten.remainder.Scalar, (rest, digit.size))
            if not is_first:
                rest = graph.call_function(aten.div.Tensor_mode, (rest, digit.size), {"rounding_mode": "floor"})
            term = value if stride == 1 else graph.call_function(aten.mul.Tensor, (value, stride))
            found = term if found is None else graph.call_function(aten.add.Tensor, (found, term))
        stride *= digit.size
    if found is None:  # the only row or head
        found = index
    return found if offset == 0 else graph.call_function(aten.add.Tensor, (found, offset))
