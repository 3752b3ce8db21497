"""Embeddings whose gradients would be sparse train as on one process, by dense ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.parity import compare_copy


class Sparse(nn.Module):
    """Of tokens, and of bags of them."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(10, 4, mode="sum", sparse=sparse)
        self.last = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.last(self.tokens(tokens).sum(1) + self.bags(tokens)).square().mean()
        return loss


TOKENS = torch.arange(24).view(8, 3) % 10


def check(sizes: dict[str, int]) -> None:
    """Compare with the same model with dense gradients. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    dense, sparse = Sparse(sparse=False), Sparse(sparse=True)
    sparse.load_state_dict(dense.state_dict())
    compare_copy(f"on {sizes}", dense, {"tokens": TOKENS}, mesh, opener="last", model=sparse)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}, {"pipe": 2}], ids=str)
def test_training_equals_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes)
