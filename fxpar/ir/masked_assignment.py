"""Let assignments to the places of a mask be computed at all places, so that no shape depends on the mask."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.example_values import add_call


def assign_at_all_places(module: fx.GraphModule) -> None:
    """Replace every `x[mask] = value` in `module`, a graph from Dynamo, whose value is the same at all places.

    Its gradient would be `grad[mask]`, which has as many rows as the mask has true elements; and what is pointwise can
    be sharded in every dim. A value with a row for each true element is left as it is.

    Before: `x[mask] = value`
    After:  `x.copy_(where(mask[..., None], value, x))`, of as many dims as `x`
    """
    for node in module.graph.find_nodes(op="call_function", target=operator.setitem):
        assigned, mask, value = node.args
        if _is_mask(mask, assigned) and _is_same_everywhere(value, mask, assigned):
            places = add_call(node, operator.getitem, mask, (..., *[None] * (_dims(assigned) - _dims(mask))))
            node.op, node.target = "call_method", "copy_"
            node.args = assigned, add_call(node, torch.where, places, value, assigned)
    module.recompile()


def _is_mask(index: Any, assigned: Any) -> bool:
    if not (isinstance(index, fx.Node) and isinstance(assigned, fx.Node)):
        return False
    mask = index.meta.get("example_value")
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() > 0


def _is_same_everywhere(value: Any, mask: fx.Node, assigned: fx.Node) -> bool:
    """Whether all true elements of the mask are assigned the same: a number, or one row."""
    if not isinstance(value, fx.Node):
        return True
    tensor = value.meta.get("example_value")
    dims_of_row = _dims(assigned) - _dims(mask)
    if not isinstance(tensor, Tensor):
        return False
    sizes = tensor.shape[: max(0, tensor.dim() - dims_of_row)]
    return all(isinstance(size, int) and size == 1 for size in sizes)  # selected rows have a size that is not known


def _dims(node: fx.Node) -> int:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), f"{node} returns {type(value).__name__}, not a tensor"
    return value.dim()
