"""Read an op call: its shapes, as rules need them, and its arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import schema
from fxpar.ir import node_meta
from fxpar.rules.rule import LocalOp, OpCall, Shape


class Parameter(NamedTuple):
    """A parameter of an ATen op's schema."""

    name: str
    default: Any
    takes_tensor: bool
    takes_list: bool


@cache
def parameters(target: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters of an ATen op, in schema order."""
    assert isinstance(target, torch._ops.OpOverload), f"{target} is no ATen op"
    return tuple(
        Parameter(
            argument.name,
            argument.default_value,
            "Tensor" in str(argument.type),
            str(argument.type).startswith(("List", "Optional[List")),
        )
        for argument in schema(target).arguments
    )


def op_call(node: fx.Node) -> OpCall:
    """The op that a traced `call_function` node calls, in the logical shapes of its fake values."""
    assert callable(node.target), f"{node.format_node()} is no call"
    operands: list[Shape] = []

    def note(operand: fx.Node) -> fx.Node:
        value = node_meta.value(operand)
        if isinstance(value, Tensor):
            operands.append(tuple(value.shape))
        return operand

    fx.map_arg((node.args, node.kwargs), note)
    value = node_meta.value(node)
    results = value if isinstance(value, (tuple, list)) else (value,)
    shapes = tuple(tuple(r.shape) if isinstance(r, Tensor) else None for r in results)
    return OpCall(node.target, node.args, node.kwargs, tuple(operands), shapes)


def argument(call: OpCall, name: str) -> Any:
    """The value of parameter `name`, whether passed by position, by keyword, or left at its default."""
    return _bound(call, call.args, call.kwargs, name)


def local_argument(local: LocalOp, name: str) -> Any:
    """As `argument`, with local nodes in the place of tensors."""
    return _bound(local.call, local.args, local.kwargs, name)


def _bound(call: OpCall, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for position, parameter in enumerate(parameters(call.target)):
        if parameter.name == name:
            return args[position] if position < len(args) else kwargs.get(name, parameter.default)
    raise AssertionError(f"{call.target} has no parameter {name!r}")


def has_parameter(call: OpCall, name: str) -> bool:
    """Whether the op's schema has parameter `name`."""
    return any(parameter.name == name for parameter in parameters(call.target))


def dim_argument(call: OpCall, name: str = "dim", rank: int | None = None) -> int:
    """A parameter that names a dim, counted from the front; of the first operand unless `rank` is given."""
    dim: int = argument(call, name)
    return dim % max(len(call.inputs[0]) if rank is None else rank, 1)


def tensor_slots(call: OpCall) -> list[bool]:
    """For each slot of the schema that can take a tensor (a list has one per element), whether a tensor is there."""
    slots: list[bool] = []
    for parameter in parameters(call.target):
        if parameter.takes_tensor:
            value = argument(call, parameter.name)
            slots.extend(_is_tensor(v) for v in (value if parameter.takes_list else (value,)))
    return slots


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(node_meta.value(value), Tensor)


def with_arguments(local: LocalOp, **replaced: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The local op's arguments with some replaced by name."""
    args, kwargs = list(local.args), dict(local.kwargs)
    for position, parameter in enumerate(parameters(local.call.target)):
        if parameter.name in replaced:
            value = replaced.pop(parameter.name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[parameter.name] = value
    assert not replaced, f"{local.call.target} has no parameters {sorted(replaced)}"
    return args, kwargs
