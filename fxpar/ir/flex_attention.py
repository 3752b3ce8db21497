"""Calls of flex attention that hold their graphs, so that passes meet an op whose operands are tensors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from unittest.mock import patch

from torch import Tensor, fx

from fxpar._torch.flex_attention import (
    flex_attention,
    flex_attention_backward,
    sdpa_dense,
    sdpa_dense_backward,
    training_on_cpus,
)
from fxpar.ir.held_graphs import HoldingCall, erase_unused
from fxpar.ir.node_meta import set_value, value

_NUM_OPERANDS = {"forward": 3, "backward": 7}
"""The operands before the block mask: query, key, value; out, logsumexp and the gradients of these."""


@dataclass(frozen=True, eq=False, repr=False)
class FlexCall(HoldingCall):
    """Flex attention or its backward, with the graphs that PyTorch passes as arguments: the target of a node.

    Called with (query, key, value, block_mask, scale, kernel_options, score_buffers, mask_buffers), where the block
    mask lacks its function, it returns (out, logsumexp, max_scores). The backward takes (out, logsumexp, grad_out,
    grad_logsumexp) after the value, and returns the gradients of query, key, value and of each score buffer: None for
    one that needs none.

    graphs: of the score's modification, in a backward that of its gradient, and of the mask. Each takes the indices of
        batch, head, query and key, and the buffers; all but the mask's take the score first.

    Source: `torch._higher_order_ops.flex_attention`.
    """

    kind: Literal["forward", "backward"]

    @property
    def prefix(self) -> str:
        """The op."""
        return "flex_attention_backward" if self.kind == "backward" else "flex_attention"

    def __call__(self, *args: Any) -> tuple[Tensor | None, ...]:
        """Call PyTorch's op."""
        return self._call(flex_attention if self.kind == "forward" else flex_attention_backward, args)

    def define(self, *args: Any) -> tuple[Tensor | None, ...]:
        """The same by products and a softmax: all scores are in memory at a time."""
        return self._call(sdpa_dense if self.kind == "forward" else sdpa_dense_backward, args)

    def _call(self, op: Any, args: Sequence[Any]) -> tuple[Tensor | None, ...]:
        num_operands = _NUM_OPERANDS[self.kind]
        operands, (blocks, scale, options, score_buffers, mask_buffers) = args[:num_operands], args[num_operands:]
        *graphs, mask = self.graphs
        if self.kind == "backward":  # the definition differentiates with respect to what requires gradients
            pairs = zip(score_buffers, self.differentiated, strict=True)
            score_buffers = tuple(each.detach().requires_grad_() if needed else each for each, needed in pairs)
        results = op(*operands, *graphs, (*blocks, mask), scale, dict(options), score_buffers, mask_buffers)
        return tuple(results) if self.kind == "forward" else self.flat(results)

    @cached_property
    def differentiated(self) -> tuple[bool, ...]:
        """Of each score buffer, whether the graph of the gradient computes a gradient for it."""
        (results,) = self.graphs[1].graph.output_node().args
        assert isinstance(results, tuple | list), "gradients of the score, of four indices and of buffers"
        return tuple(isinstance(gradient, fx.Node) for gradient in results[5:])

    def flat(self, results: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """What PyTorch's op returns for a backward, without the inner tuple of the gradients of buffers."""
        *gradients, of_buffers = results
        pairs = zip(of_buffers, self.differentiated, strict=True)
        return *gradients, *(found if needed else None for found, needed in pairs)


def hold_flex_graphs(module: fx.GraphModule) -> None:
    """Replace every call of flex attention in `module`, and in graphs inside it, by one that holds its graphs.

    Before: `out = flex_attention(q, k, v, self.score_mod_0, (..., self.mask_fn_0), ...)`
    After:  `out = flex_attention_1f0e23cd00a1b2c3(q, k, v, (...), ...)`
    """
    for owner in module.modules():
        if not isinstance(owner, fx.GraphModule):
            continue
        calls = [node for node in owner.graph.nodes if node.target in (flex_attention, flex_attention_backward)]
        for node in calls:
            if node.target is flex_attention:
                _hold(owner, node, "forward")
            else:
                _flatten_results(owner.graph, _hold(owner, node, "backward"))
        if calls:
            owner.recompile()


def _hold(owner: fx.GraphModule, node: fx.Node, kind: Literal["forward", "backward"]) -> fx.Node:
    args: tuple[Any, ...] = node.args
    start = _NUM_OPERANDS[kind]
    stop = start + (1 if kind == "forward" else 2)
    (*blocks, mask), scale, options, *buffers = args[stop:]
    graphs: list[fx.Node] = [*args[start:stop], mask]
    call = FlexCall(tuple(operator.attrgetter(str(graph.target))(owner) for graph in graphs), kind)
    args = (*args[:start], tuple(blocks), scale, options, *buffers, *[()] * (2 - len(buffers)))
    with owner.graph.inserting_before(node):
        holding = owner.graph.call_function(call, args)
    holding.meta = dict(node.meta)
    node.replace_all_uses_with(holding)
    owner.graph.erase_node(node)
    erase_unused(graphs)
    return holding


def _flatten_results(graph: fx.Graph, backward: fx.Node) -> None:
    """Let the items of a backward be tensors: PyTorch returns the gradients of buffers as a tuple within its tuple."""
    call, results = backward.target, value(backward)
    assert isinstance(call, FlexCall), f"{backward} is no flex attention"
    set_value(backward, call.flat(results))
    last = len(results) - 1
    for item in list(backward.users):
        if item.args[1] == last:
            for inner in list(item.users):
                position: Any = inner.args[1]
                inner.args = backward, last + position
            graph.erase_node(item)


@contextmanager
def flex_attention_in_one_graph() -> Iterator[None]:
    """Within, Dynamo traces flex attention without a break: with gradients on CPUs, and behind masks of padding.

    What makes these masks in transformers looks whether there is padding at all, which a trace cannot.
    """
    masks = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        stack.enter_context(training_on_cpus())
        if hasattr(masks, "fast_all"):
            stack.enter_context(patch.object(masks, "fast_all", _is_known_to_be_true))
        yield


def _is_known_to_be_true(mask: Tensor) -> bool:
    """Whether a mask is known to be true everywhere, so that it may be left out: no."""
    return False
