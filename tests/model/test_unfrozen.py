"""Parameters that were frozen when a model was distributed, and are trained later, get the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.world.launch import RankFailedError, run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard

WIDTH, LAYERS = 8, 4


class Chain(nn.Module):
    """Equal layers, of which the first two are frozen, and the third in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        self.layers[:2].requires_grad_(False)
        self.layers[2][0].bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(x), y)


def unfreeze_each(part: nn.Module) -> None:
    for parameter in part.parameters():
        parameter.requires_grad = True


def unfreeze_module(part: nn.Module) -> None:
    part.requires_grad_()


Unfreeze = Callable[[nn.Module], None]


def train(
    model: Chain, step: Callable[..., Tensor], batch: Mapping[str, Tensor], unfreeze: Unfreeze, at: Mapping[int, int]
) -> list[float]:
    """Losses of steps, and of evaluations between them. `at`: by the step, the layer that is unfrozen before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number in range(6):
        if number in at:
            unfreeze(model.layers[at[number]])
        if number == 5:
            model.layers[1].requires_grad_(False)
        optimizer.zero_grad()
        loss = step(**batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            losses += [loss.item(), step(**batch).item()]
    return losses


def prepare() -> tuple[Chain, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Chain(), {"x": torch.randn(8, WIDTH), "y": torch.randint(WIDTH, (8,))}


def check(sizes: Mapping[str, int], unfreeze: Unfreeze, at: Mapping[int, int]) -> None:
    """Compare the losses with those of one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    alone, whole = prepare()
    expected = train(alone, alone, whole, unfreeze, at)
    model, _ = prepare()
    part = batch_shard(whole, mesh)
    fxpar.distribute(model, mesh, stages=["layers.2"][: mesh.pipe - 1], microbatches=2, example_inputs=part)
    found = train(model, torch.compile(model, backend="fxpar", options=ATEN), part, unfreeze, at)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"z": 2}, {"data": 2}], ids=str)
def test_what_is_unfrozen_between_steps_is_trained(mesh: dict[str, int]) -> None:
    run_ranks(2, check, mesh, unfreeze_each, {1: 1, 3: 0})


def test_modules_of_a_pipeline_are_unfrozen_on_all_ranks() -> None:
    run_ranks(2, check, {"pipe": 2}, unfreeze_module, {1: 1, 3: 0})


def test_parameters_of_a_pipeline_are_unfrozen_before_the_first_step() -> None:
    run_ranks(2, check, {"pipe": 2}, unfreeze_each, {0: 1})


def test_a_parameter_of_one_stage_that_is_unfrozen_later_is_an_error() -> None:
    told = r'parameter layers.1.0.weight requires grad(.|\n)*call model.get_submodule\("layers.1.0"\).requires_grad_'
    with pytest.raises(RankFailedError, match=told):
        run_ranks(2, check, {"pipe": 2}, unfreeze_each, {1: 1})
