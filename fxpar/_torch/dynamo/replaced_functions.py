"""Dynamo traces other functions in the place of some of PyTorch's."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
from torch._dynamo.variables import TorchInGraphFunctionVariable, UserFunctionVariable

_replaced: dict[Callable[..., Any], Callable[..., Any]] = {}


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


def _no_flags(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


@cache
def _install() -> None:
    call = TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        other = _replaced.get(self.value)
        if other is None:
            return call(self, tx, args, kwargs)
        return UserFunctionVariable(cast(FunctionType, other)).call_function(tx, args, kwargs)

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]
