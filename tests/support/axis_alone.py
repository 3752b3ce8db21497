"""What ranks train along one or two axes: models of several layers, in one process per rank for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxpar
from tests.support.parity import BATCH, Run, batch_shard, check_run, loss_of, stage_openers, token_batch
from tests.support.small_models import hf_gpt2

STEPS = 5
CHUNKS = 4
"""Microbatches times batch shards: that many draw random numbers, or statistics, of their own."""


class Normalized(nn.Module):
    """Convolutions with batch norms between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((1, 6), (6, 6), (6, 2)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2))

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = images
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = norm(layer(x)).relu()
        return F.mse_loss(self.layers[-1](x), targets)


def with_dropout_and_a_frozen_layer() -> nn.Module:
    """GPT-2 of three layers, the first of which is not trained."""
    model = hf_gpt2(layers=3, dropout=0.2)
    model.get_submodule("transformer.h.0").requires_grad_(False)
    return model


def image_batch(size: int) -> dict[str, Tensor]:
    """Random images and what they shall become."""
    return {"images": torch.randn(size, 1, 6, 6), "targets": torch.randn(size, 2, 6, 6)}


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss of each step, and all whole gradients of the last, by name."""

    losses: Sequence[float]
    gradients: Mapping[str, Tensor]


def train_all(run: Run) -> Trained:
    """Check `run` and batch norms against plain training, and train with dropout. For `run_ranks`."""
    mesh = fxpar.init_mesh(**run.mesh)
    check_run(run, mesh)
    check_batch_norms(mesh)
    return train_with_dropout(mesh)


def train_with_dropout(mesh: fxpar.Mesh) -> Trained:
    """The same on all meshes."""
    torch.manual_seed(1)
    model = with_dropout_and_a_frozen_layer()
    stages = stage_openers("transformer.h", 2)[: mesh.pipe - 1]
    return train(model, mesh, stages, lambda: token_batch(("input_ids", "labels"), CHUNKS))


def check_batch_norms(mesh: fxpar.Mesh) -> None:
    """Each microbatch has statistics of its own, on one process as on the mesh."""
    torch.manual_seed(2)
    model = Normalized()
    alone = copy.deepcopy(model)
    state = torch.get_rng_state()
    found = train(model, mesh, ["layers.1"][: mesh.pipe - 1], lambda: image_batch(BATCH))
    torch.set_rng_state(state)
    image_batch(BATCH)  # the example that the other was distributed by
    optimizer = torch.optim.AdamW(alone.parameters(), eps=1e-6)
    for expected in found.losses:
        optimizer.zero_grad()
        chunks = zip(*(each.chunk(CHUNKS) for each in image_batch(BATCH).values()), strict=True)
        loss = torch.stack([alone(*chunk) for chunk in chunks]).mean()
        loss.backward()
        torch.testing.assert_close(float(loss.detach()), expected, rtol=1e-5, atol=0)
        optimizer.step()
    for name, gradient in found.gradients.items():
        expected_gradient = alone.get_parameter(name).grad
        assert expected_gradient is not None
        close = 1e-4 * expected_gradient.abs().max().item() + 1e-7  # the gradient of a bias before a norm is zero
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=close)


def train(
    model: nn.Module, mesh: fxpar.Mesh, stages: Sequence[str], make_batch: Callable[[], Mapping[str, Tensor]]
) -> Trained:
    """Train by AdamW for `STEPS` steps, each on a new batch."""
    shards = fxpar.num_batch_shards(mesh)
    microbatches = CHUNKS // shards
    first = {name: each.chunk(shards)[0] for name, each in make_batch().items()}
    fxpar.distribute(model, mesh, stages=stages, microbatches=microbatches, schedule="1f1b", example_inputs=first)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-6)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(step(**batch_shard(make_batch(), mesh)))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    gradients = {
        name: cast(DTensor, parameter.grad).full_tensor()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Trained(losses, gradients)
