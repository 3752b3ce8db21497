"""Hooks of modules, which may be registered and removed after the model was distributed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn

from fxpar._torch.compiler import never_compiled

_OF_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_KINDS = (*_OF_FORWARD, "_backward_pre_hooks", "_backward_hooks")


class ModuleHooks:
    """The hooks of the modules of a model, below the model itself.

    A trace has those in it that were registered then, and Dynamo does not guard that they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_module = [vars(module)[kind] for module in model.modules() if module is not model for kind in _KINDS]

    @never_compiled
    def registered(self) -> tuple[int, ...]:
        """The numbers that PyTorch has given them, in order; every step asks."""
        return tuple(chain.from_iterable(filter(None, self._by_module)))


@never_compiled
def never_compile_hooks(model: nn.Module) -> None:
    """Let hooks of `model` itself run as plain Python, on what a step is given and returns, rather than as graphs."""
    for kind in _OF_FORWARD:
        hooks = vars(model)[kind]
        for number, hook in hooks.items():
            if not isinstance(hook, _PlainHook):
                hooks[number] = _PlainHook(hook)


class _PlainHook:
    """A hook that Dynamo does not compile."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._run = never_compiled(hook)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._run(*args, **named)
