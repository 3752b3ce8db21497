"""Write the losses that are divided by the number of their targets as a sum and that number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpar.ir.example_values import add_call, value_of_call
from fxpar.ir.node_meta import known_value


def total_weight(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The sum of the class weights (1 without any) of all targets that are not ignored; no dims, at least 32 bits."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum(dtype=torch.float32)
    precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return torch.where(counts, precise[torch.where(counts, target, 0)], 0.0).sum()


def _quotient(total: Tensor, weight: Tensor) -> Tensor:
    """In the dtype of the loss, as if it had been a mean."""
    return torch.true_divide(total, weight).to(total.dtype)


_MEANS: tuple[Callable[..., Any], ...] = (functional.cross_entropy, functional.nll_loss)
"""The functions of PyTorch whose mean is over a number of targets that only the data tell."""


def has_counted_mean(node: fx.Node, known: Set[fx.Node]) -> bool:
    """Whether `node` calls a loss that is divided by the total weight of its targets, which are all among `known`."""
    if node.target not in _MEANS:
        return False
    given = arguments_by_name(node)
    target, weight = given["target"], given["weight"]
    is_mean = given["reduction"] == "mean" and given["size_average"] is None and given["reduce"] is None
    return is_mean and {target, weight} <= {*known, None} and not known_value(target).is_floating_point()


def divide_by_counts(module: fx.GraphModule, known: Set[fx.Node]) -> None:
    """Let each loss of `module`, a graph from Dynamo, for which `has_counted_mean` be a quotient.

    Before: `loss = cross_entropy(logits, target, ignore_index=-100)`
    After:  `total = cross_entropy(logits, target, ignore_index=-100, reduction="sum")`
            `loss = _quotient(total, total_weight(target, None, -100))`
    """
    for node in list(module.graph.nodes):
        if has_counted_mean(node, known):
            given = arguments_by_name(node)
            divisor = add_call(node, total_weight, given["target"], given["weight"], given["ignore_index"])
            of_sum = given | {"reduction": "sum"}
            with module.graph.inserting_before(node):
                total = module.graph.call_function(node.target, (), of_sum)
            total.meta = {**node.meta, "example_value": value_of_call(node.target, (), of_sum)}
            node.target, node.args, node.kwargs = _quotient, (total, divisor), {}
    module.recompile()


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    assert callable(node.target)
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
