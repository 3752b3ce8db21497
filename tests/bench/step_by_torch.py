"""What ranks do when torch's pipelines are compared with one process; apart from the tests, to start quickly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.bench.models import example
from fxpar.bench.pipeline.torch_pipeline import torch_steps


@dataclass(frozen=True, slots=True)
class Case:
    """A small model of the examples, and what opens its stages."""

    model: str
    boundaries: Sequence[str]


BATCH, MICROBATCHES = 12, 6


def check_steps(case: Case) -> list[str]:
    """Compare loss and gradients of two steps under each schedule with one process; the parameters of this rank."""
    model, batch = small(case.model)
    loss = model(**batch)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    names: set[str] = set()
    for step in torch_steps(model, batch, case.boundaries, MICROBATCHES, compiled=False).values():
        model.zero_grad()
        for _ in range(2):
            check_loss(step(), loss.item())
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-4, atol=1e-6)
        names |= found.keys()
    return sorted(names)


def check_loss(found: float, expected: float) -> None:
    """Only the last rank knows it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        assert math.isclose(found, expected, rel_tol=1e-5), f"loss {found}, expected {expected}"
    else:
        assert math.isnan(found)


def small(name: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """A model with random weights and a batch for it, the same on every rank."""
    torch.manual_seed(0)
    module = example(name)
    if name == "gpt":
        ids = torch.randint(64, (BATCH, 9))
        config = module.Config(vocabulary=64, context=8, layers=4, heads=2, hidden=16)
        return module.GPT(config), {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    noisy, noise = torch.randn(2, BATCH, 1, 8, 8)
    batch = {"noisy": noisy, "times": torch.randint(1000, (BATCH,)), "noise": noise}
    return module.NoisePredictor(module.Config(8, channels=(8, 16), head=4, groups=4)), batch
