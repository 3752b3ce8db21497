"""Optimizers without a parameter, which PyTorch refuses; seen in torch 2.11 to 2.13."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


def accept_empty_lists(is_expected: Callable[[], bool]) -> None:
    """Let an optimizer of an empty list of parameters have a group without any, where `is_expected`."""
    make = Optimizer.__init__

    @functools.wraps(make)
    def __init__(self: Optimizer, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        if not isinstance(params, torch.Tensor):
            params = list(params) or ([{"params": []}] if is_expected() else [])
        make(self, params, defaults)

    Optimizer.__init__ = __init__  # type: ignore[method-assign]
