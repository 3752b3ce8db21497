"""Marks in a graph where what is computed has an effect only if a branch was taken."""

from typing import Any

import torch
from torch import Tensor


def begin_branch(condition: Any, holds: bool) -> None:
    """What follows is to have an effect where the truth of `condition`, a tensor or a number of one, is `holds`."""
    raise AssertionError("branches are for passes")


def end_branch() -> None:
    """The end of the branch that was begun last."""
    raise AssertionError("branches are for passes")


def value_of_branch(taken: Tensor, otherwise: Tensor) -> Tensor:
    """What a variable has after the branch that ends next: another value where the branch was taken."""
    return torch.where(torch.ones((), dtype=torch.bool, device=otherwise.device), taken, otherwise)
