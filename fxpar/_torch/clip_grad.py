"""The functions that take the norm of gradients, and clip by it, seen in torch 2.11 to 2.13."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch.nn.utils import clip_grad

Replacement: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function of PyTorch's own one."""


def replace_norms(clip_grad_norm: Replacement, get_total_norm: Replacement) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` and `get_total_norm` run what these make of PyTorch's own functions.

    PyTorch's first calls the second.
    """
    _replace(clip_grad.clip_grad_norm_, clip_grad_norm)
    _replace(clip_grad._get_total_norm, get_total_norm)


def _replace(wrapper: Any, replacement: Replacement) -> None:
    """Scripts may have imported the function already: it looks up what it runs in a cell, where this is put."""
    cell = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))["func"]
    cell.cell_contents = replacement(cell.cell_contents)
