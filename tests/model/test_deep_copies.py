"""Deep copies of a distributed model compute with tensors of their own, as on one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import batch_shard, compare

mesh = pytest.fixture(mesh_of_one_process)

TOKENS, WIDTH = 12, 8


class Reader(nn.Module):
    """Embeddings that are tied to the scores, a recurrent layer, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.recurrent = nn.Embedding(TOKENS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.scores = nn.Linear(WIDTH, TOKENS)
        self.scores.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        hidden, _ = self.recurrent(self.tokens(x))
        return functional.cross_entropy(self.scores(hidden).transpose(1, 2), x)


def check_averages(sizes: Mapping[str, int]) -> None:
    """Train and average, then evaluate and train the average itself. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone, whole = Reader(), {"x": torch.randint(0, TOKENS, (4 * fxpar.num_batch_shards(mesh), 3))}
    model, part = copy.deepcopy(alone), batch_shard(whole, mesh)
    fxpar.distribute(model, mesh, stages=["scores"][: mesh.pipe - 1], example_inputs=part)
    pairs = ((alone, alone, whole), (model, torch.compile(model, backend="fxpar", options=ATEN), part))
    averages = [AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for plain, _, _ in pairs]
    for (plain, step, batch), average in zip(pairs, averages, strict=True):
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        for _ in range(2):
            step(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(plain)
    expected, average = (each.module for each in averages)
    step = torch.compile(average, backend="fxpar", options=ATEN)
    with torch.no_grad():
        torch.testing.assert_close(step(**part), expected(**whole), rtol=1e-5, atol=0)
    losses = expected(**whole), step(**part)
    for loss in losses:
        loss.backward()
    compare(f"the average on {mesh}", *losses, expected, average)
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(pairs[1][1](**part), alone(**whole), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_an_average_of_weights_is_as_on_one_process(sizes: dict[str, int]) -> None:
    run_ranks(2, check_averages, sizes)


def test_a_copy_has_its_own_tensors_and_state(mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Reader(), mesh)
    first = copy.deepcopy(model)
    second = copy.deepcopy(first)
    steps = [torch.compile(each, backend="fxpar", options=ATEN) for each in (model, first, second)]
    tokens = torch.randint(0, TOKENS, (4, 3))
    steps[1](tokens)
    assert [each.seen.item() for each in (model, first, second)] == [0, 1, 0]
    assert first.scores.weight is first.tokens.weight is not model.tokens.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    second.load_state_dict(model.state_dict())
    losses = [step(tokens).item() for step in steps]
    assert losses[0] == losses[2] != losses[1]
