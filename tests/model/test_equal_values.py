"""All ranks begin with the values of rank 0, whatever theirs are: those that they drew, or did not load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import RankFailedError, run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard

WIDTH = 8


class Drawn(nn.Module):
    """Draws parameters, of which one is tied, a buffer that is in no state dict, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("projection", torch.randn(WIDTH, WIDTH), persistent=False)
        self.order = torch.randperm(WIDTH)
        self.scale = torch.rand((), dtype=torch.complex64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens) @ self.projection)
        return (self.head(hidden[..., self.order]) * self.scale.real).logsumexp(-1).mean()


def of_seed(seed: int) -> Drawn:
    torch.manual_seed(seed)
    return Drawn()


def loaded_by_first_rank(rank: int) -> Drawn:
    model = of_seed(1)
    if rank == 0:
        model.load_state_dict(of_seed(0).state_dict())
    return model


def on_meta_but_for_first_rank(rank: int) -> Drawn:
    with torch.device("meta" if rank > 0 else "cpu"):
        return of_seed(0)


def losses(model: nn.Module, step: Callable[..., Tensor], tokens: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found


def tokens_of_all() -> Tensor:
    return torch.randint(16, (8, 3), generator=torch.Generator().manual_seed(0))


def distributed_losses(sizes: Mapping[str, Any], make: Callable[[int], nn.Module]) -> list[float]:
    mesh = fxpar.init_mesh(**sizes)
    model, tokens = make(mesh.rank), batch_shard({"tokens": tokens_of_all()}, mesh)["tokens"]
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=(tokens,))
    return losses(model, torch.compile(model, backend="fxpar", options=ATEN), tokens)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"data": 2}, {"z": 2}, {"x": 2}, {"pipe": 2, "data": 2}], ids=str)
def test_ranks_that_draw_other_values_train_as_the_first_rank_alone(sizes: Mapping[str, int]) -> None:
    model = of_seed(0)
    expected = losses(model, model, tokens_of_all())
    for found in run_ranks(math.prod(sizes.values()), distributed_losses, sizes, of_seed):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_that_the_first_rank_has_loaded_is_that_of_all() -> None:
    model = loaded_by_first_rank(0)
    expected = losses(model, model, tokens_of_all())
    for found in run_ranks(2, distributed_losses, {"data": 2}, loaded_by_first_rank):
        assert found == pytest.approx(expected, rel=1e-5)


def test_ranks_that_have_a_model_on_meta_where_the_first_does_not_are_told() -> None:
    with pytest.raises(RankFailedError, match=r"the model's tensors \(ranks 1; rank 0 has .* on meta'\)"):
        run_ranks(2, distributed_losses, {"data": 2}, on_meta_but_for_first_rank)
