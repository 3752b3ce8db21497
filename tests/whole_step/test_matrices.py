"""Forwards that factorise, invert and solve with matrices, which PyTorch checks for success."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import compare_copy

mesh = pytest.fixture(mesh_of_one_process)

OPERATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "solve": torch.linalg.solve,
    "inv": lambda a, b: torch.linalg.inv(a) @ b,
    "cholesky": lambda a, b: torch.linalg.cholesky(a) @ b,
    "density": lambda a, b: torch.distributions.MultivariateNormal(b[..., 0], a).log_prob(b[..., 1]),
}


class Factorising(nn.Module):
    """Symmetric matrices made of each row of the batch, between two layers."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], shift: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(4, 4)
        self.operation, self.shift = operation, shift

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).view(-1, 4, 4)
        a = a @ a.mT + self.shift * torch.eye(4)
        return self.operation(a, self.last(x.view(-1, 2, 4)).mT).square().mean()


def check_operations(sizes: Mapping[str, int]) -> None:
    """A step of each. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for name, operation in OPERATIONS.items():
        torch.manual_seed(0)
        alone, whole = Factorising(operation), {"x": torch.randn(8, 8)}
        compare_copy(f"{name} on {sizes}", alone, whole, mesh, opener="last")


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_operations_on_matrices_equal_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_operations, sizes)


def test_a_matrix_that_cannot_be_factorised_is_an_error(mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Factorising(OPERATIONS["cholesky"], shift=-1e3), mesh)
    with pytest.raises(RuntimeError, match=r"linalg.cholesky: a matrix is singular, or not what the operation needs"):
        torch.compile(model, backend="fxpar", options=ATEN)(torch.randn(4, 8))
