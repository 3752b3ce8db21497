"""Calls of ATen ops to prove rules with: recorded from PyTorch's own samples, and from whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fxpar.ir.flex_attention import FlexCall


class Call(NamedTuple):
    """An op and its arguments."""

    target: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The same for calls that differ only in the values of their tensors."""
        described = tree_map_only(
            Tensor, lambda t: (t.dtype, tuple(t.shape), t.stride()), (self.args, dict(self.kwargs))
        )
        return f"{self.target}{described}"

    @property
    def num_elements(self) -> int:
        """How many elements its tensors have."""
        return sum(leaf.numel() for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor))


class Recorder(TorchDispatchMode):
    """Records every ATen call made inside it, with copies of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept_args, kept_kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs or {}))
        self.calls.append(Call(func, kept_args, kept_kwargs))
        return func(*args, **kwargs or {})


class _GraphRecorder(fx.Interpreter):
    """Runs a graph and records its calls."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[Call] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload | FlexCall):
            self.calls.append(Call(target, args, kwargs))
        return super().call_function(target, args, kwargs)


def calls_in(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Call]:
    """The calls that a graph makes."""
    recorder = _GraphRecorder(module)
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder.calls


def different(calls: Sequence[Call]) -> Iterator[Call]:
    """Calls, without those that differ only in the values of their tensors."""
    yield from {call.key: call for call in calls}.values()
