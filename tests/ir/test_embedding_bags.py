"""Bags of embeddings with a row of ids each train as on one process, and each by itself."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpar
from fxpar.errors import BatchMixingWarning
from fxpar.world.launch import run_ranks
from tests.support.captures import captured
from tests.support.parity import compare_copy

IDS = torch.tensor([[1, 2, 2], [0, 0, 0], [3, 0, 9], [0, 4, 1]] * 2)
WAYS = [
    {"mode": mode, "padding_idx": padding}
    for mode, padding in itertools.product(("sum", "mean", "max"), (None, 0, -10))
]


class Bags(nn.Module):
    """Layers of bags, one for each way, the first with weights for its ids, and what is computed of them."""

    def __init__(self, *ways: Mapping[str, Any]) -> None:
        super().__init__()
        self.weighted = nn.EmbeddingBag(10, 4, mode="sum")
        self.bags, self.last = nn.ModuleList(nn.EmbeddingBag(10, 4, **way) for way in ways), nn.Linear(4, 4)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        found = [self.weighted(ids, per_sample_weights=weights), *(bags(ids) for bags in self.bags)]
        loss: Tensor = self.last(torch.stack(found)).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    return {"ids": IDS, "weights": torch.rand(8, 3)}


def check(sizes: dict[str, int]) -> None:
    """Compare with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchMixingWarning)
        compare_copy(f"on {sizes}", Bags(*WAYS), batch(), mesh, opener="last")


@pytest.mark.parametrize("sizes", [{"x": 2}, {"pipe": 2, "z": 2}], ids=str)
def test_training_equals_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes)


@pytest.mark.parametrize("way", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_bags_of_which_embeddings_do_not_tell_stay_as_they_are(way: Mapping[str, Any]) -> None:
    capture, _ = captured(Bags(way).eval(), batch())
    targets = [node.target for node in capture.module.graph.nodes]
    assert targets.count(F.embedding_bag) == 1
