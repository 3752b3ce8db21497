"""Numbers among the arguments that change from step to step cost one more compile, unless their values are needed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.model.distribution import distribution_of_model
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import batch_shard, compare

mesh = pytest.fixture(mesh_of_one_process)


class Annealed(nn.Module):
    """Two layers whose loss has a weight that is an argument, beside one that decides what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, weights: Mapping[str, float], layers: int = 2, step: int = 0) -> Tensor:
        for layer in self.layers[:layers]:
            x = layer(x).relu() + x
        penalty = self.layers[0].weight.square().mean()
        return x.square().mean() + weights["penalty"] * (1 + step / 4) * penalty


def check_annealed(sizes: Mapping[str, int]) -> int:
    """Six steps with another weight each; how often they compiled. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone = Annealed()
    model, whole = copy.deepcopy(alone), {"x": torch.randn(8, 8)}
    part = batch_shard(whole, mesh)
    stages = ["layers.1"][: mesh.pipe - 1]
    example = {**part, "weights": {"penalty": 0.0}}
    fxpar.distribute(model, mesh, stages=stages, microbatches=2, example_inputs=example)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for number in range(6):
        given: dict[str, Any] = {"weights": {"penalty": 0.1 * number}, "step": number}
        expected, found = alone(**whole, **given), step(**part, **given)
        expected.backward()
        found.backward()
        compare(f"step {number} on {sizes}", expected, found, alone, model)
    with torch.no_grad():
        for number in range(2):
            given = {"weights": {"penalty": -1.0 - number}, "step": number}
            torch.testing.assert_close(step(**part, **given), alone(**whole, **given))
    return len(distribution_of_model(model, "test").compiled)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}], ids=str)
def test_a_number_that_is_computed_with_is_traced_as_a_tensor_once_it_has_changed(sizes: dict[str, int]) -> None:
    for compiled in run_ranks(math.prod(sizes.values()), check_annealed, sizes):
        assert compiled == 3, "for the first numbers, for all others, and for evaluation"


def test_a_number_whose_value_is_needed_stays_a_constant(mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone = Annealed()
    model, x = copy.deepcopy(alone), torch.randn(4, 8)
    step = torch.compile(fxpar.distribute(model, mesh), backend="fxpar", options=ATEN)
    for number in range(6):
        given: dict[str, Any] = {"weights": {"penalty": 0.1 * number}, "layers": 2 - number % 2}
        torch.testing.assert_close(step(x, **given), alone(x, **given))
    assert len(distribution_of_model(model, "test").compiled) == 3, "for the first weight, and by layers"


@pytest.mark.parametrize("value", [2**70, math.inf])
def test_numbers_that_no_tensor_holds_stay_what_they_are(value: float, mesh: fxpar.Mesh) -> None:
    step = torch.compile(fxpar.distribute(Annealed(), mesh), backend="fxpar", options=ATEN)
    for penalty in (1.0, value):
        found = step(torch.ones(4, 8), {"penalty": penalty})
        assert found.isfinite() == math.isfinite(penalty)
