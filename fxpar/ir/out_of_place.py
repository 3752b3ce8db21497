"""Let operations in place return new values where nobody can tell: a stage may begin between them and their operand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.branches import begin_branch, end_branch, value_of_branch
from fxpar._torch.compiler import FakeTensor, storage_of
from fxpar.ir.example_values import value_of_call
from fxpar.ir.node_meta import known_value

_OPERATORS: dict[Callable[..., Any] | str, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = {
    f"{name}_": name for name in ("add", "sub", "mul", "div", "clamp", "masked_fill", "relu", "sigmoid", "tanh")
}


def write_out_of_place(module: fx.GraphModule) -> None:
    """Rewrite pointwise operations in place of `module`, a graph from Dynamo, if no view of the operand is read later.

    Nor may the operand belong to the caller or to a module, or be from before a branch that the operation is in
    (`fxpar._torch.branches`). What reads it later reads the new value. Without grad, what is changed in place keeps the
    gradient that it had, and what is computed has none; so such operations stay.

    Before: `iadd(x, y)`, `relu(x)`
    After:  `z = add(x, y)`, `relu(z)`
    """
    nodes = list(module.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    views: dict[int, list[fx.Node]] = {}
    with_grad = True
    begun: list[int] = []
    for place, node in enumerate(nodes):
        if node.target is begin_branch:
            begun.append(place)
        elif node.target is end_branch:
            begun.pop()
        if node.target is torch._C._set_grad_enabled:
            with_grad = bool(node.args[0])
        rewritten = out_of_place(node) if with_grad else None
        if rewritten is not None:
            operand: Any = node.args[0]
            others = [each for each in views[storage_of(known_value(operand))] if each is not operand]
            read_later = any(places[user] > place for each in others for user in each.users)
            held = any(map(_is_held, [operand, *others])) or places[operand] < max(begun, default=0)
            if not read_later and not held and _returns_the_same(node, operand, *rewritten):
                node.op, node.target, node.kwargs = rewritten
                operand.replace_all_uses_with(node, lambda user, place=place: places[user] > place)
        if isinstance(value := known_value(node), Tensor):
            views.setdefault(storage_of(value), []).append(node)
    module.recompile()


def _is_held(node: fx.Node) -> bool:
    """Whether others may hold the value of the node: it is an argument, a buffer, a parameter, or that of a branch."""
    is_given = node.op in ("placeholder", "get_attr") or str(node.target).startswith("fxpar.")
    return is_given or node.target is value_of_branch


def out_of_place(node: fx.Node) -> tuple[str, Any, dict[str, Any]] | None:
    """The kind, the target and the keyword arguments of the operation that returns a new value, if there is one."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or not all(
        isinstance(known_value(used), FakeTensor) for used in node.all_input_nodes
    ):
        return None
    if node.op == "call_function" and node.target in _OPERATORS:
        return node.op, _OPERATORS[node.target], dict(node.kwargs)
    if node.op == "call_method" and node.target in _METHODS:
        return node.op, _METHODS[node.target], dict(node.kwargs)
    if node.op == "call_function" and node.kwargs.get("inplace"):
        return node.op, node.target, {**node.kwargs, "inplace": False}
    return None


def _returns_the_same(node: fx.Node, operand: fx.Node, op: str, target: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the other operation returns a value of the type and shape of the operand, which one in place keeps."""

    def call(*args: Any, **kwargs: Any) -> Any:
        function = getattr(args[0], target) if op == "call_method" else target
        return function(*args[op == "call_method" :], **kwargs)

    found, expected = value_of_call(call, node.args, kwargs), known_value(operand)
    return _type(found) == _type(expected)


def _type(value: Tensor) -> tuple[torch.dtype, Sequence[int], Sequence[int]]:
    return value.dtype, value.shape, value.stride()
