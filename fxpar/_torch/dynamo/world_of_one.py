"""A forward is traced as on one process: to its calls of `torch.distributed` the world has one rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TorchInGraphFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable

from fxpar._torch.compiler import traces_wider

_CALLED = "_fxpar_collectives_called"


@functools.cache
def trace_in_world_of_one() -> None:
    """Let Dynamo trace, within `wider_tracing`, what functions of `torch.distributed` do where there is one rank.

    So it is for the default process group. Collectives over other groups are traced as they are.
    """
    _intercept(TorchInGraphFunctionVariable, "value")
    _intercept(UserFunctionVariable, "fn")
    _intercept(CollectiveFunctionRewriteVariable, "fn")


def collectives_called() -> list[str]:
    """The collectives over the default group in a trace, by name; to be called while Dynamo calls the backend."""
    found: list[str] = vars(InstructionTranslator.current_tx().output).get(_CALLED, [])
    return list(dict.fromkeys(found))


def _intercept(kind: type[VariableTracker], attribute: str) -> None:
    call = kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        called = getattr(self, attribute)
        alone = _of_one_rank().get(called) if traces_wider() else None
        if alone is None or not _is_over_all(alone, args, kwargs):
            return call(self, tx, args, kwargs)
        if alone not in (_rank, _world_size, _barrier, _wait):
            vars(tx.output).setdefault(_CALLED, []).append(called.__name__)
        return UserFunctionVariable(cast(FunctionType, alone)).call_function(tx, args, kwargs)

    kind.call_function = call_function  # type: ignore[method-assign]


def _is_over_all(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the argument `group` of a call is the default process group, or is not given."""
    try:
        group = inspect.signature(function).bind(*args, **kwargs).arguments.get("group")
    except TypeError:
        return False  # PyTorch says what is wrong
    if group is None:
        return True
    group = group.realize()
    value = group.as_python_constant() if group.is_python_constant() else getattr(group, "value", group)
    value = getattr(value, "real_obj", value)
    return value is None or value is dist.group.WORLD or value == getattr(dist.group.WORLD, "group_name", None)


class _Done:
    """The work of a collective that has nothing to wait for."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _rank(group: Any = None) -> int:
    return 0


def _world_size(group: Any = None) -> int:
    return 1


def _barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> _Done | None:
    return _Done() if async_op else None


def _wait(tensor: Tensor) -> Tensor:
    return tensor


# Collectives that write their results: autograd does not see them.


def _all_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Done | None:
    return _Done() if async_op else None


def _broadcast(
    tensor: Tensor, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
) -> _Done | None:
    return _Done() if async_op else None


def _reduce(
    tensor: Tensor, dst: Any = None, op: Any = None, group: Any = None, async_op: bool = False, group_dst: Any = None
) -> _Done | None:
    return _Done() if async_op else None


def _all_gather_into(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> _Done | None:
    return _all_to_all([output_tensor], [input_tensor], group, async_op)


def _reduce_scatter_into(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> _Done | None:
    return _all_to_all([output], [input], group, async_op)


def _all_to_all_into(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    return _all_to_all([output], [input], group, async_op)


def _all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> _Done | None:
    return _all_to_all(tensor_list, [tensor], group, async_op)


def _reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = None, group: Any = None, async_op: bool = False
) -> _Done | None:
    return _all_to_all([output], input_list, group, async_op)


def _all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None, async_op: bool = False
) -> _Done | None:
    output, input = _only(output_tensor_list), _only(input_tensor_list)
    if output.numel() != input.numel():
        raise ValueError(_OTHER_SIZE)
    output.copy_(input.detach().reshape(output.shape))
    return _Done() if async_op else None


def _gather(
    tensor: Tensor,
    gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> _Done | None:
    return _all_to_all(gather_list, [tensor], group, async_op)


def _scatter(
    tensor: Tensor,
    scatter_list: Any = None,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
) -> _Done | None:
    return _all_to_all([tensor], scatter_list, group, async_op)


# Collectives that return their results, which have gradients.


def _one_with(tensor: Tensor, option: Any = None, other: Any = None, group: Any = None, tag: str = "") -> Tensor:
    return tensor.clone()


def _one(tensor: Tensor, option: Any = None, group: Any = None, tag: str = "") -> Tensor:
    return tensor.clone()


def _tuple_of_one(tensor: Tensor, group: Any = None) -> tuple[Tensor, ...]:
    return (tensor.clone(),)


def _gathered(tensor: Tensor, dst: Any = 0, group: Any = None) -> tuple[Tensor, ...]:
    return (tensor.clone(),)


def _scattered(tensors: Sequence[Tensor], src: Any = 0, group: Any = None) -> Tensor:
    return _only(tensors).clone()


def _reduced_of(output: Tensor, inputs: Sequence[Tensor], op: Any = None, group: Any = None) -> Tensor:
    return _only(inputs).clone()


def _all_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any = None) -> tuple[Tensor, ...]:
    return (_only(inputs).clone(),)


def _all_of_one(
    output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, group: Any = None
) -> Tensor:
    return input.clone()


_OTHER_SIZE = (
    "a collective of more than one rank: a model's forward is traced as on one process, where "
    "torch.distributed.get_world_size() is 1; it must ask for the size when it runs, and not keep one from before"
)


def _only(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(_OTHER_SIZE)
    return tensors[0]


@functools.cache
def _of_one_rank() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """What is traced in the place of each function."""
    by_name: tuple[tuple[Any, Mapping[str, Callable[..., Any]]], ...] = (
        (
            dist,
            {
                "get_rank": _rank,
                "get_world_size": _world_size,
                "barrier": _barrier,
                "all_reduce": _all_reduce,
                "broadcast": _broadcast,
                "reduce": _reduce,
                "all_gather_into_tensor": _all_gather_into,
                "all_gather_single": _all_gather_into,
                "_all_gather_base": _all_gather_into,
                "reduce_scatter_tensor": _reduce_scatter_into,
                "reduce_scatter_single": _reduce_scatter_into,
                "_reduce_scatter_base": _reduce_scatter_into,
                "all_to_all_single": _all_to_all_into,
                "all_gather": _all_gather,
                "reduce_scatter": _reduce_scatter,
                "all_to_all": _all_to_all,
                "gather": _gather,
                "scatter": _scatter,
            },
        ),
        (
            differentiable,
            {
                "all_reduce": _one,
                "broadcast": _one,
                "reduce": _one_with,
                "all_gather": _tuple_of_one,
                "gather": _gathered,
                "scatter": _scattered,
                "reduce_scatter": _reduced_of,
                "all_to_all": _all_of,
                "all_to_all_single": _all_of_one,
            },
        ),
        (
            functional,
            {
                "wait_tensor": _wait,
                "all_reduce": _one,
                "broadcast": _one,
                "all_gather_tensor": _one,
                "all_gather_tensor_autograd": _one,
                "all_gather_single": _one,
                "all_gather_single_autograd": _one,
                "reduce_scatter_tensor": _one_with,
                "reduce_scatter_tensor_autograd": _one_with,
                "reduce_scatter_single": _one_with,
                "reduce_scatter_single_autograd": _one_with,
                "all_to_all_single": _one_with,
                "all_to_all_single_autograd": _one_with,
            },
        ),
    )
    return {
        getattr(module, name): alone
        for module, functions in by_name
        for name, alone in functions.items()
        if hasattr(module, name)  # some have come with torch 2.13
    }
