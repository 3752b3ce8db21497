"""Models that assign to the places of a mask train as on one process, and no shape depends on the mask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN

Assign: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]


def a_number(h: Tensor, mask: Tensor, row: Tensor) -> None:
    h[mask] = -1


def a_row(h: Tensor, mask: Tensor, row: Tensor) -> None:
    h[mask] = row


def a_row_of_a_matrix(h: Tensor, mask: Tensor, row: Tensor) -> None:
    h[mask] = row[None]


def a_scalar_at_single_elements(h: Tensor, mask: Tensor, row: Tensor) -> None:
    h[h > 0] = row.sum()


def a_row_in_a_view(h: Tensor, mask: Tensor, row: Tensor) -> None:
    h[:, 1:][mask[:, 1:]] = row


def rows_of_their_own(h: Tensor, mask: Tensor, row: Tensor) -> None:
    h[mask] = torch.arange(12.0).view(3, 4)


ASSIGNS = [
    a_number,
    a_row,
    a_row_of_a_matrix,
    a_scalar_at_single_elements,
    a_row_in_a_view,
    rows_of_their_own,
]

MASK = torch.tensor([[True, False, True], [False, False, True]])


class Assigning(nn.Module):
    """Overwrites what its first layer computes, in places, by numbers or by a parameter."""

    def __init__(self, assign: Assign) -> None:
        super().__init__()
        self.first, self.second, self.assign = nn.Linear(4, 4), nn.Linear(4, 4), assign
        self.row = nn.Parameter(torch.tensor([0.5, -0.5, 1.0, 2.0]))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        self.assign(h, mask, self.row)
        return self.second(h).square().mean()


def check(sizes: dict[str, int]) -> None:
    """Compare a step of each model on a mesh with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for assign in ASSIGNS:
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4)
        alone = Assigning(assign)
        model = fxpar.distribute(copy.deepcopy(alone), mesh, example_inputs=(x, MASK))
        for loss in (alone(x, MASK), torch.compile(model, backend="fxpar", options=ATEN)(x, MASK)):
            loss.backward()
        for name, parameter in model.named_parameters():
            expected, found = alone.get_parameter(name).grad, parameter.grad
            assert (expected is None) == (found is None), f"{name} of {assign.__name__}"
            if expected is not None and isinstance(found, DTensor):
                torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-6)


def test_training_equals_one_process() -> None:
    run_ranks(2, check, {"x": 2})
