"""Inline the regions that a model checkpoints into the graph around them, and record the region of each node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import fx

from fxpar._torch.compiler import tag_activation_checkpoint
from fxpar.ir.node_meta import set_region
from fxpar.ir.replace_items import replace_items


def inline_checkpoints(module: fx.GraphModule) -> None:
    """Replace every call of a checkpointed region by the ops of the region, in place.

    The backward will recompute what a region computes (see `fxpar.graph.recompute`). A region inside another belongs to
    the outer one. Source: `torch.utils.checkpoint`, as Dynamo captures it.

    Before: `out = tag_activation_checkpoint(body, x, w)`, where body is `h = linear(x, w); return (relu(h),)`
    After:  `h = linear(x, w); relu = relu(h)`, both of region 0
    """
    regions = count()
    for node in list(module.graph.nodes):
        if node.target is tag_activation_checkpoint:
            _inline(module, node, str(next(regions)))
    module.recompile()


def _inline(module: fx.GraphModule, call: fx.Node, region: str) -> None:
    with module.graph.inserting_before(call):
        given = _write(module, module, call, call.args[1:], region)
    body = call.args[0]
    replace_items(call, given)
    if isinstance(body, fx.Node) and not body.users:
        # Nothing else that seems dead may be erased: fx does not know which operations change values in place.
        module.graph.erase_node(body)


def _write(
    module: fx.GraphModule, owner: fx.GraphModule, call: fx.Node, operands: Sequence[Any], region: str
) -> tuple[Any, ...]:
    """Write the body of `call`, a node of the graph of `owner`, into that of `module`; returns its results."""
    first = call.args[0]
    assert isinstance(first, fx.Node) and isinstance(first.target, str), f"{call} does not have its body first"
    body = owner.get_submodule(first.target)
    assert isinstance(body, fx.GraphModule), f"{call} calls no graph"
    copies: dict[fx.Node, Any] = {}
    entering = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(entering)
        elif node.op == "output":
            return tuple(fx.map_arg(node.args[0], copies.__getitem__))
        elif node.target is tag_activation_checkpoint:
            copies[node] = _write(module, body, node, fx.map_arg(node.args[1:], copies.__getitem__), region)
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op != "get_attr":  # a get_attr is the body of a region inside: Dynamo passes tensors in
            copies[node] = module.graph.node_copy(node, copies.__getitem__)
            set_region(copies[node], region)
    raise AssertionError(f"the checkpointed region {call} returns nothing")
