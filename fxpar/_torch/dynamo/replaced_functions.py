"""Dynamo traces other functions in the place of some of PyTorch's."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable, UserFunctionVariable

from fxpar._torch.compiler import traces_wider

_replaced: dict[Callable[..., Any], Callable[..., Any]] = {}

_replaced_in_steps: dict[Callable[..., Any] | str, Callable[..., Any]] = {}
"""Functions, and methods of tensors by their names, that are traced so within `wider_tracing` alone."""


def trace_in_place_of(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """From now on, let traces of `function`, one that Dynamo does not trace into, be those of `other`."""
    _replaced[function] = other
    _install()


@contextmanager
def tracing_in_place_of(function: Callable[..., Any], other: Callable[..., Any]) -> Iterator[None]:
    """The same within, for what would be wrong in other traces."""
    before = _replaced.get(function)
    trace_in_place_of(function, other)
    try:
        yield
    finally:
        if before is None:
            del _replaced[function]
        else:
            _replaced[function] = before


def trace_past_flags_of_kernels() -> None:
    """Let Dynamo trace past `torch.backends.cudnn.flags`, without effect: losses use it that have no kernel there."""
    trace_in_place_of(torch.backends.cudnn.flags, _no_flags)


def trace_counts_of_known_length() -> None:
    """Let Dynamo trace `bincount` with a least length as that many counts: how many there are depends on values.

    A larger number is an error of the step then, where PyTorch would return more counts.
    """
    _replaced_in_steps.update(dict.fromkeys((torch.bincount, "bincount"), _counts))
    _install()


def _counts(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if weights is not None or minlength == 0:
        found: Tensor = torch.ops.aten.bincount(input, weights, minlength)
        return found
    zeros = torch.zeros(minlength, dtype=torch.int64, device=input.device)
    return zeros.scatter_add(0, input.long(), torch.ones_like(input, dtype=torch.int64))


def _no_flags(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _replaced_in_step(called: Callable[..., Any] | str) -> Callable[..., Any] | None:
    return _replaced_in_steps.get(called) if traces_wider() else None


@cache
def _install() -> None:
    call = TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        other = _replaced.get(self.value) or _replaced_in_step(self.value)
        if other is None:
            return call(self, tx, args, kwargs)
        return UserFunctionVariable(cast(FunctionType, other)).call_function(tx, args, kwargs)

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]
    call_method = TensorVariable.call_method

    def call_replaced_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        other = _replaced_in_step(name)
        if other is None:
            return call_method(self, tx, name, args, kwargs)
        return UserFunctionVariable(cast(FunctionType, other)).call_function(tx, [self, *args], kwargs)

    TensorVariable.call_method = call_replaced_method  # type: ignore[method-assign]
