"""Refuse the steps of optimizers that were made before `distribute`, and hold parameters that it replaced."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpar.errors import StaleOptimizerError

_NAMED = 3

_replaced = WeakTensorKeyDictionary()
"""Replaced parameter -> name; weak, so that it keeps no parameter alive."""

_checked: WeakSet[Optimizer] = WeakSet()
"""The optimizers that are known to hold no replaced parameter."""


def refuse_stale_optimizers(replaced: Mapping[str, Tensor]) -> None:
    """From now on, an optimizer of one of the `replaced` parameters raises StaleOptimizerError when it steps."""
    for name, parameter in replaced.items():
        _replaced[parameter] = name
    _checked.clear()
    _install()


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if stale := [_replaced[parameter] for parameter in held if parameter in _replaced]:
        raise StaleOptimizerError(type(optimizer).__name__, stale[:_NAMED], len(stale))
    _checked.add(optimizer)
