"""Hooks that are registered and removed after a model was distributed are called as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.small import Small

mesh = pytest.fixture(mesh_of_one_process)

INPUT = torch.linspace(-1, 1, 8).view(2, 4)


def tripled(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 3


def halved(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] / 2,)


def tripled_by_keyword(module: nn.Module, args: Any, named: Any, result: Tensor) -> Tensor:
    return result * 3


REGISTER: dict[str, Callable[[Small], RemovableHandle]] = {
    "after a layer": lambda model: model.layers[0].register_forward_hook(tripled),
    "after a layer, with keywords": lambda model: model.layers[0].register_forward_hook(
        tripled_by_keyword, with_kwargs=True
    ),
    "before a layer": lambda model: model.layers[2].register_forward_pre_hook(halved),
    "after the model": lambda model: model.register_forward_hook(tripled),
    "before the model": lambda model: model.register_forward_pre_hook(halved),
}


def train(model: Small, step: Callable[[Tensor], Tensor], register: str, first: int) -> list[Tensor]:
    """Losses and gradients of steps, with the hook from step `first` until the last but one."""
    found = []
    for number in range(first + 3):
        if number == first:
            handle = REGISTER[register](model)
        if number == first + 2:
            handle.remove()
        model.zero_grad()
        loss = step(INPUT)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters()]
        found += [loss.detach(), *(each.full_tensor() if isinstance(each, DTensor) else each for each in gradients)]
    return found


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("register", REGISTER)
def test_hooks_are_called_from_when_they_are_registered_until_they_are_removed(
    mesh: fxpar.Mesh, register: str, first: int
) -> None:
    model = fxpar.distribute(Small(), mesh, example_inputs=(INPUT,))
    assert isinstance(model, Small)
    found = train(model, torch.compile(model, backend="fxpar", options=ATEN), register, first)
    alone = Small()
    torch.testing.assert_close(found, train(alone, alone, register, first))


def losses_of_stages(register: str) -> list[float]:
    mesh = fxpar.init_mesh(pipe=2)
    model = fxpar.distribute(Small(), mesh, stages=["layers.2"], microbatches=2, example_inputs=(INPUT,))
    assert isinstance(model, Small)
    found = train(model, torch.compile(model, backend="fxpar", options=ATEN), register, 1)
    return [each.item() for each in found if each.dim() == 0]


@pytest.mark.parametrize("register", ["after a layer", "before the model"])
def test_all_stages_call_hooks(register: str) -> None:
    alone = Small()
    expected = [each.item() for each in train(alone, alone, register, 1) if each.dim() == 0]
    for found in run_ranks(2, losses_of_stages, register):
        assert found == pytest.approx(expected, rel=1e-6)
