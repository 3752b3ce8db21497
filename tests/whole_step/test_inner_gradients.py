"""Forwards that differentiate their own values train as on one process: of forces, equations and penalties."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.parity import batch_shard, compare


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.mT / 3).softmax(-1) @ v)


class Forces(nn.Module):
    """Energies of molecules and, with respect to the positions of atoms, forces; also in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(3, 8), nn.ModuleList(Attention(8) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, positions: Tensor, energies: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            positions.requires_grad_(True)
            hidden = self.enter(positions)
            for layer in self.layers:
                hidden = layer(hidden)
            found = self.head(hidden).sum((1, 2))
            first = functional.mse_loss(found, energies)
            forces = -torch.autograd.grad(found.sum(), positions, create_graph=True)[0]
        return {"loss": first + forces.square().mean(), "forces": forces.detach()}


class Equation(nn.Module):
    """The residual of Burgers' equation: first and second derivatives of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points: Tensor) -> Tensor:
        points = points.clone()
        points.requires_grad = True
        u = self.network(points)
        ones = torch.ones_like(u)
        by_x, by_t = torch.autograd.grad(u, points, ones, create_graph=True)[0].split(1, -1)
        by_xx = torch.autograd.grad(by_x, points, ones, create_graph=True)[0][:, :1]
        return (by_t + u * by_x - 0.01 * by_xx).square().mean()


class Penalty(nn.Module):
    """A penalty on gradients with respect to hidden values, one of which depends on the other, and on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        later = self.second(hidden).sigmoid()
        score = self.last(later)
        wanted = [hidden, later, self.second.weight]
        of_hidden, of_later, of_weight = torch.autograd.grad(score.sum(), wanted, create_graph=True)
        (held,) = torch.autograd.grad(score.sum(), hidden, retain_graph=True)
        assert of_weight.shape == (8, 8)
        return score.mean() + (of_hidden.norm(dim=1) - 1).square().mean() + (of_later * hidden * held).mean()


class Descent(nn.Module):
    """A layer that goes a step down the gradient of its energy, twice."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.memories = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            energy = -functional.softplus(self.memories(x)).sum()
            return x - 0.1 * torch.autograd.grad(energy, x, create_graph=True)[0]

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers, self.leave = (
            nn.Linear(6, 8),
            nn.ModuleList(self.Layer() for _ in range(2)),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x).square().mean()


MODELS = {
    "descent": (Descent, [(8, 6)]),
    "forces": (Forces, [(8, 5, 3), (8,)]),
    "equation": (Equation, [(8, 2)]),
    "penalty": (Penalty, [(8, 6)]),
}


def check_gradients(sizes: Mapping[str, int], lowering: str) -> None:
    """Compare steps of all models, and an evaluation of those that differentiate in one. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for name, (build, shapes) in MODELS.items():
        torch.manual_seed(0)
        alone = build()
        model = copy.deepcopy(alone)
        whole = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
        mine = tuple(batch_shard(whole, mesh).values())
        fxpar.distribute(model, mesh, microbatches=2, example_inputs=tuple(given.clone() for given in mine))
        step = torch.compile(model, backend="fxpar", options={"lowering": lowering, "results": "all"})
        expected = alone(*(given.clone() for given in whole.values()))
        found = step(*(given.clone() for given in mine))
        of_loss = [each["loss"] if isinstance(each, dict) else each for each in (expected, found)]
        for loss in of_loss:
            loss.backward()
        compare(f"{name} on {mesh}", of_loss[0], of_loss[1], alone, model)
        if isinstance(found, dict):
            with torch.no_grad():
                evaluated = step(*(given.clone() for given in mine))
            for each in (found, evaluated):
                torch.testing.assert_close(each["forces"].full_tensor(), expected["forces"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "lowering"),
    [({"pipe": 2, "x": 2}, "aten"), ({"z": 2}, "inductor")],
    ids=str,
)
def test_training_equals_one_process(sizes: Mapping[str, int], lowering: str) -> None:
    run_ranks(math.prod(sizes.values()), check_gradients, sizes, lowering)
