"""What a forward computes of constants alone decides its branches while it is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import FxparError
from tests.support.one_process import ATEN, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


class Deciding(nn.Module):
    """Two equal layers with something between them that depends on values."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.decide(layer(x))
        return x.square().mean()


def reversed_times(x: Tensor) -> Tensor:
    times, steps = torch.linspace(0.0, 1.0, 3), []
    if (times[1:] < times[:-1]).all():
        times = -times
    for i in range(2):
        steps.append((times[i + 1] - times[i]) * x)
        if times[i] > 0.4:
            steps.append(x.sin())
    return torch.stack(steps).sum(0)


def sizes_in_tensors(x: Tensor) -> Tensor:
    sizes = torch.tensor([[1, 3], [2, 2]])
    first, second = sizes.prod(1).tolist()
    return torch.cat([x[:, :first], x[:, -int(sizes.amax().item()) :]], 1)[:, :4] * second


def mask_by_length(x: Tensor) -> Tensor:
    mask = torch.arange(4) < 3
    return x.masked_fill(mask, 0) if bool(mask.any()) and not mask.all() else x


def filled_in_place(x: Tensor) -> Tensor:
    mask = torch.zeros(4)
    mask[1:3] = 1
    mask[3].sub_(2)
    scale = mask.clone().mul_(2)
    return x * scale if mask.sum() == 0 else torch.cat([x, x])[: len(x) + 1]


@pytest.mark.parametrize("decide", [reversed_times, sizes_in_tensors, mask_by_length, filled_in_place])
def test_values_of_constants_decide_while_a_forward_is_traced(
    mesh: fxpar.Mesh, decide: Callable[[Tensor], Tensor]
) -> None:
    alone, model, x = Deciding(decide), Deciding(decide), torch.randn(6, 4)
    fxpar.distribute(model, mesh, microbatches=2)
    found, expected = torch.compile(model, backend="fxpar", options=ATEN)(x), alone(x)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected)
    gradient, wanted = model.layers[0][0].weight.grad, alone.layers[0][0].weight.grad  # type: ignore[index]
    torch.testing.assert_close(gradient.full_tensor(), wanted)


class Scaled(nn.Module):
    """A layer that acts by a value that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, rate: Tensor) -> Tensor:
        return self.inner(x) * 2 if rate > 0.5 else self.inner(x)


class OfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.linspace(0.0, 1.0, 3)
        for layer, rate in zip(self.layers, rates, strict=True):
            x = layer(x, rate)
        return x.square().mean()


def test_equal_layers_that_are_given_other_values_act_by_their_own(mesh: fxpar.Mesh) -> None:
    alone, model, x = OfLayers(), OfLayers(), torch.randn(6, 4)
    fxpar.distribute(model, mesh)
    found = torch.compile(model, backend="fxpar", options=ATEN)(x)
    torch.testing.assert_close(found, alone(x))


def changed_in_place(x: Tensor) -> Tensor:
    rate = torch.zeros(())
    rate.add_(x.detach().mean())
    parts = [x, x.sin()] if rate > 0.5 else [x]
    return torch.stack(parts).sum(0)


def by_a_view(x: Tensor) -> Tensor:
    rates = torch.zeros(3)
    rates[1:][0] = x.detach().mean()
    parts = [x, x.sin()] if rates.sum() > 0.5 else [x]
    return torch.stack(parts).sum(0)


def by_chance(x: Tensor) -> Tensor:
    parts = [x, x.sin()] if torch.rand(()) > 0.5 else [x]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("decide", [changed_in_place, by_a_view, by_chance])
def test_what_depends_on_inputs_or_on_chance_decides_nothing(
    mesh: fxpar.Mesh, decide: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(FxparError, match="A tensor decides whether the branch"):
        fxpar.distribute(Deciding(decide), mesh, example_inputs=(torch.randn(6, 4),))


class Gated(Deciding):
    """Its second layer is called where a parameter of the first one is positive."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [x, self.layers[1](x)] if self.layers[0][0].bias.sum() > 0 else [x]  # type: ignore[index]
        return torch.stack(parts).square().mean()


def test_parameters_decide_nothing(mesh: fxpar.Mesh) -> None:
    with pytest.raises(FxparError, match="A tensor decides whether the branch"):
        fxpar.distribute(Gated(reversed_times), mesh, example_inputs=(torch.randn(6, 4),))
