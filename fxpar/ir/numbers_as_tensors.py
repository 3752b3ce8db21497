"""Keep the numbers that a forward reads from tensors as tensors of no dims, so that nothing waits for their values."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.branches import begin_branch
from fxpar._torch.compiler import assert_async, sym_sqrt, traced_torch_tensor
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.example_values import add_call, value_of_call
from fxpar.ir.node_meta import source_line
from fxpar.ir.parts_of_rows import SPLITS, select_parts

aten = torch.ops.aten


def _read(tensor: Tensor) -> Tensor:
    """A tensor in place of its number; a floating-point one in 64 bits, as Python's numbers are."""
    number = tensor.detach()
    return number.double() if number.is_floating_point() else number


def _quotient(dividend: Any, divisor: Any) -> Tensor:
    """As of numbers of Python: in 64 bits, where tensors of integers are divided in fewer."""
    terms = [term.double() if isinstance(term, Tensor) else term for term in (dividend, divisor)]
    return torch.true_divide(*terms)


def _largest(one: Any, other: Any) -> Tensor:
    tensor, bound = (one, other) if isinstance(one, Tensor) else (other, one)
    return torch.maximum(tensor, bound) if isinstance(bound, Tensor) else torch.clamp(tensor, min=bound)


def _smallest(one: Any, other: Any) -> Tensor:
    tensor, bound = (one, other) if isinstance(one, Tensor) else (other, one)
    return torch.minimum(tensor, bound) if isinstance(bound, Tensor) else torch.clamp(tensor, max=bound)


def _sum(numbers: Sequence[Any]) -> Any:
    return functools.reduce(operator.add, numbers)


def _whole(rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As what rounds a number of Python to a whole one."""
    return lambda number: rounded(number).long() if number.is_floating_point() else number


def _round(number: Tensor, digits: int | None = None) -> Tensor:
    if digits is not None and number.is_floating_point():
        return torch.round(number, decimals=digits)
    return _whole(torch.round)(number)


def _tensor(data: Any, **options: Any) -> Tensor:
    """As `torch.tensor`, of numbers and tensors of no dims in lists; of the widest type that any of them has."""
    if isinstance(data, Tensor):
        return data
    if not isinstance(data, list | tuple):
        return torch.tensor(data)
    parts = [_tensor(each) for each in data]
    dtype = torch.float64 if any(each.is_floating_point() for each in parts) else parts[0].dtype
    return torch.stack([each.to(dtype) for each in parts])


def _full(size: Sequence[int], number: Tensor, **options: Any) -> Tensor:
    return number.expand(size).clone()


def _full_like(like: Tensor, number: Tensor, **options: Any) -> Tensor:
    return _full(like.shape, number)


def _new_full(like: Tensor, size: Sequence[int], number: Tensor, **options: Any) -> Tensor:
    return _full(size, number)


def _clamp(tensor: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """One bound after the other: a call takes two numbers or two tensors."""
    raised = tensor if min is None else torch.clamp(tensor, min=min)
    return raised if max is None else torch.clamp(raised, max=max)


_TAKING_TENSORS = frozenset(
    {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "true_divide", "floor_divide", "remainder", "fmod"}
    | {"pow", "pow_", "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "masked_fill_", "fill_"}
)
"""Functions of torch and methods of tensors that take, by position, a tensor of no dims for a number."""

_ON_TENSORS: dict[Any, Callable[..., Any]] = {
    torch.scalar_tensor: _tensor,
    traced_torch_tensor: _tensor,
    torch.full: _full,
    torch.full_like: _full_like,
    "new_full": _new_full,
    torch.clamp: _clamp,
    "clamp": _clamp,
    "__round__": _round,
    math.floor: _whole(torch.floor),
    math.ceil: _whole(torch.ceil),
    math.trunc: _whole(torch.trunc),
    torch.sym_int: _whole(torch.trunc),
    sym_sqrt: torch.sqrt,
    torch.sym_ite: torch.where,
    torch.sym_not: torch.logical_not,
    torch.sym_float: Tensor.double,
    torch.sym_max: _largest,
    torch.sym_min: _smallest,
    torch.sym_sum: _sum,
    aten._assert_scalar.default: assert_async,
    begin_branch: begin_branch,
}
"""What computes on tensors what a function of PyTorch's symbolic numbers computes on these."""


def keep_numbers_as_tensors(module: fx.GraphModule) -> None:
    """Let every `Tensor.item()` in `module`, a graph from Dynamo, be the detached tensor, and compute with that.

    Assertions about such numbers, of Dynamo or of the model, become assertions about tensors.

    Parts of a tensor whose sizes are such numbers are rows that masks select (`fxpar.ir.parts_of_rows`).

    Before: `n = lengths.max().item(); ok = n <= 8; _assert_scalar(ok, ...); y = x * n`
    After:  `n = _read(lengths.max()); ok = n <= 8; _assert_async(ok, ...); y = x * n`

    Raises:
        UnsupportedGraphError: a number decides what is computed: a size, an index, or a result that leaves.
    """
    uses = _uses(module)
    targets = {node: _on_tensors(node, number) for node, number in uses.items() if node.target not in SPLITS}
    for node, target in targets.items():
        node.op, node.target = "call_method" if isinstance(target, str) else "call_function", target
        node.meta.pop("unbacked_bindings", None)  # it binds no symbol any more
        if target is assert_async:
            node.args = (node.args[0], f"an assertion about a number in a tensor failed: {source_line(uses[node])}")
        elif target is not begin_branch:
            _note_value(node, target)
    for node in uses:
        if node.target in SPLITS:
            select_parts(node)
    module.recompile()


def _uses(module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """The nodes that read a number from a tensor or use one, in order, each with the node that reads it."""
    uses: dict[fx.Node, fx.Node] = {}
    numbers: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target == "item":
            uses[node] = numbers[node] = node
            _complete(node.all_input_nodes[0])
            continue
        read = next((numbers[operand] for operand in node.all_input_nodes if operand in numbers), None)
        if read is not None:
            uses[node] = read
            if not _is_tensor(node) and node.target not in SPLITS:
                numbers[node] = read
    return uses


def _complete(element: fx.Node) -> None:
    """Note the value of an element that Dynamo takes out of a tensor for `tolist`, without saying what it is."""
    if "example_value" not in element.meta:
        assert callable(element.target), f"{element} takes an element"
        element.meta["example_value"] = value_of_call(element.target, element.args)


def _on_tensors(node: fx.Node, number: fx.Node) -> Callable[..., Any] | str:
    """What computes `node` if `number`, which it reads or uses, is a tensor."""
    target: Callable[..., Any] | str = node.target
    if node is number:
        return _read
    if target is operator.truediv and not _is_tensor(node):
        return _quotient
    if target in _ON_TENSORS:
        return _ON_TENSORS[target]
    if _takes_tensors(node) or (not isinstance(target, str) and _is_operator(target)):
        return target
    raise UnsupportedGraphError(
        f"the forward reads a number from a tensor and uses it for {node.name}, which needs its value: "
        f"{source_line(number)}\n  the values of tensors are not known where the forward is traced: expected tensors "
        "throughout, or numbers that are only computed with and compared; leave out .item() or .tolist(), or pass the "
        "number as an argument"
    )


def _takes_tensors(node: fx.Node) -> bool:
    """Whether it is a call of torch that takes tensors for numbers, all of which it is given by position."""
    name = node.target if isinstance(node.target, str) else node.target.__name__
    of_torch = name is node.target or getattr(torch, name, None) is node.target
    by_keyword = any(isinstance(value, fx.Node) and not _is_tensor(value) for value in node.kwargs.values())
    return of_torch and name in _TAKING_TENSORS and not by_keyword


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _is_operator(target: Callable[..., Any]) -> bool:
    """Whether it is an operator of Python, which computes on tensors as well."""
    return getattr(operator, target.__name__, None) is target


def _note_value(node: fx.Node, target: Callable[..., Any] | str) -> None:
    """Let the metadata of `node`, a call of `target`, have the tensor that it returns now, in the dtype of before."""
    before = node.meta["example_value"]
    value = node.meta["example_value"] = value_of_call(target, node.args, node.kwargs)
    if isinstance(before, Tensor) and before.dtype != value.dtype:
        cast = add_call(node.next, Tensor.to, node, before.dtype)
        cast.meta = {**node.meta, "example_value": cast.meta["example_value"]}
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
