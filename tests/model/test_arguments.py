"""What a step may be called with: results of the step before."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard, compare


class Recurrent(nn.Module):
    """Returns its last state beside the loss, and begins with what the caller has of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        for each in x.unbind(1):
            state = self.cell(each, state)
        return (self.out(state) - x.mean(1)).square().mean(), state.detach()


def check_states(sizes: Mapping[str, int], order: Sequence[str]) -> None:
    """Three steps, each with the state that the one before has returned. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone = Recurrent()
    model, whole = copy.deepcopy(alone), {"x": torch.randn(8, 3, 4), "state": torch.randn(8, 6)}
    part = batch_shard(whole, mesh)
    stages = ["out"][: mesh.pipe - 1]
    fxpar.distribute(model, mesh, stages=stages, microbatches=2, example_inputs=part)
    step = torch.compile(model, backend="fxpar", options={**ATEN, "results": "all"})
    for number in range(3):
        expected, whole["state"] = alone(**whole)
        found, part["state"] = step(**{name: part[name] for name in order})
        expected.backward()
        found.backward()
        compare(f"step {number} on {sizes}", expected, found, alone, model)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}], ids=str)
@pytest.mark.parametrize("order", [("x", "state"), ("state", "x")])
def test_a_result_of_all_batch_shards_may_be_an_argument_beside_tensors_of_one(
    sizes: dict[str, int], order: Sequence[str]
) -> None:
    run_ranks(math.prod(sizes.values()), check_states, sizes, order)
