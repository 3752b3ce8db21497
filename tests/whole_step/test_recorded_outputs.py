"""What transformers records by hooks, installed in the first forward that does: router logits and hidden states."""

from __future__ import annotations

import copy

import pytest
import torch

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import Run, check_runs, token_batch
from tests.support.small_models import hf_llama

mesh = pytest.fixture(mesh_of_one_process)


def test_the_loss_of_a_router_whose_experts_are_in_two_stages_equals_that_of_one_process() -> None:
    run_ranks(2, check_runs, [Run("mixtral", {"pipe": 2}, 1, schedules=("1f1b",), steps=1)])


@pytest.mark.parametrize("traced_by", ["distribute", "an evaluation", "a step"])
def test_hidden_states_are_returned_as_by_the_plain_model(traced_by: str, mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone = hf_llama(layers=2)
    model = copy.deepcopy(alone)
    batch = token_batch(("input_ids", "labels"), 2)
    asked = {**batch, "output_hidden_states": True}
    fxpar.distribute(model, mesh, example_inputs=asked if traced_by == "distribute" else None)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    if traced_by == "an evaluation":
        with torch.no_grad():
            assert len(step(**asked)["hidden_states"]) == 3
    expected, found = alone(**asked), step(**asked)
    gathered = tuple(state.full_tensor() for state in found["hidden_states"])
    torch.testing.assert_close(gathered, expected["hidden_states"])
    found["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert "hidden_states" not in step(**batch)
