"""Predicates on the ops that nodes call, for rules, costs and passes."""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import torch
from torch import fx

from fxpar._torch.distributed import c10d_functional

aten = torch.ops.aten

_WAIT = c10d_functional.wait_tensor.default


def is_pointwise(target: object) -> TypeGuard[torch._ops.OpOverload[..., Any]]:
    """Whether PyTorch tags the op as pointwise: each result element is computed from one element of each operand."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def is_random(target: object) -> TypeGuard[torch._ops.OpOverload[..., Any]]:
    """Whether the op may draw random numbers, by its tag."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def draws(node: fx.Node) -> bool:
    """Whether `node` draws random numbers: attention does so only with dropout."""
    if not isinstance(node.target, torch._ops.OpOverload) or not is_random(node.target):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(dropout != 0.0)


def is_view(target: object) -> TypeGuard[torch._ops.OpOverload[..., Any]]:
    """Whether the op returns its operand's memory in another shape or order."""
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target is aten._unsafe_view.default)


def is_collective(node: fx.Node) -> bool:
    """Whether `node` starts a collective or waits for one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == c10d_functional.name


def has_effect(node: fx.Node) -> bool:
    """Whether `node` has a side effect. Waiting for a collective is none."""
    return node.op == "call_function" and node.target is not _WAIT and node.is_impure(impure_random=False)


def is_free_to_recompute(node: fx.Node) -> bool:
    """Whether `node` costs nothing and returns the same again: a view, a constant, an item of a tuple.

    So does a wait for a collective that was started outside of the graph.
    """
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    if node.target is _WAIT:
        return node.all_input_nodes[0].op == "placeholder"
    if not isinstance(node.target, torch._ops.OpOverload) or is_random(node.target):
        return False
    return is_view(node.target) or not node.all_input_nodes
