"""PyTorch's optimizers make of sharded parameters and gradients what they make of whole ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard, compare

# Not here: Rprop and Adafactor, of whose steps DTensor cannot compute some ops; Muon, which rounds to bfloat16.
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "sgd": partial(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused sgd": partial(optim.SGD, momentum=0.9, fused=True),
    "adam": partial(optim.Adam, amsgrad=True, foreach=False),
    "fused adam": partial(optim.Adam, fused=True, maximize=True),
    "adamw": partial(optim.AdamW, foreach=True),
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": partial(optim.RMSprop, centered=True, momentum=0.5),
    "asgd": optim.ASGD,
    "adagrad": optim.Adagrad,
    "fused adagrad": partial(optim.Adagrad, fused=True),
    "adadelta": optim.Adadelta,
}


class SmallNet(nn.Module):
    """Three layers of different shapes; no gradient is near zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layers(x) - 1).square().sum(-1).mean()
        return loss


def check_optimizers(sizes: Mapping[str, int]) -> None:
    """Two steps by each, one optimizer after the other. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone, whole = SmallNet(), {"x": torch.randn(8, 8)}
    model, part = copy.deepcopy(alone), batch_shard(whole, mesh)
    stages = ["layers.2"][: mesh.pipe - 1]
    fxpar.distribute(model, mesh, stages=stages, microbatches=2, example_inputs=part)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for name, make in OPTIMIZERS.items():
        optimizers = [make(each.parameters(), lr=1e-2) for each in (alone, model)]
        for number in range(2):
            expected, found = alone(**whole), step(**part)
            expected.backward()
            found.backward()
            compare(f"{name} on {sizes}, step {number}", expected, found, alone, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for path, parameter in model.named_parameters():
            updated = cast(DTensor, parameter).full_tensor()
            torch.testing.assert_close(
                updated, alone.get_parameter(path), rtol=1e-5, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
            )


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}, {"pipe": 2}], ids=str)
def test_optimizers_step_as_in_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_optimizers, sizes)
