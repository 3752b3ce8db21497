"""A distributed model is shown, reset and moved by what scripts do with any model, or says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.distribute_model import distribute
from fxpar.errors import ConvertedModelError
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import init_mesh
from tests.support.fake_mesh import fake_mesh


class Net(nn.Module):
    """Layers with and without biases, in two stages; the last weight is that of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.second, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x)))).square().mean()


CONVERSIONS: list[Callable[[nn.Module], Any]] = [
    lambda model: model.to(torch.bfloat16),
    lambda model: model.double(),
    lambda model: model.half(),
    lambda model: model.to("meta"),
    lambda model: model.get_submodule("first").bfloat16(),
]


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_a_conversion_after_distribute_is_an_error_and_changes_nothing(convert: Callable[[nn.Module], Any]) -> None:
    with fake_mesh(z=2) as mesh:
        model = distribute(Net(), mesh)
        with pytest.raises(ConvertedModelError, match=r"torch.float32 on cpu.*before fxpar.distribute.*Precision"):
            convert(model)
        assert all(each.dtype == torch.float32 and not each.is_meta for each in model.parameters())
        assert model.to("cpu").float().cpu() is model


def check_parameters_of_other_stages() -> None:
    """For `run_ranks`."""
    mesh = init_mesh(pipe=2)
    model: Any = distribute(Net(), mesh, stages=["second"], example_inputs=(torch.ones(2, 4),))
    held = {name for name, _ in model.named_parameters()}
    assert str(model) == str(Net()), "shown as the model that it was"
    for layer in (model.first, model.norm, model.second, model.last):
        nn.init.ones_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
        assert layer.weight.shape in ((4, 4), (4,)) and layer.weight.requires_grad
    assert model.last.weight is model.first.weight
    assert {name for name, _ in model.named_parameters()} == held
    assert all((each == 1).all() for name, each in model.named_parameters() if "weight" in name), "set where it is held"
    is_first = "first.bias" in held
    assert model.first.bias.is_meta != is_first and model.last.bias.is_meta == is_first
    with pytest.raises(RuntimeError, match="meta"):
        float((model.second.weight if is_first else model.first.bias).norm())


def test_parameters_of_other_stages_have_shapes_but_no_values() -> None:
    run_ranks(2, check_parameters_of_other_stages)
