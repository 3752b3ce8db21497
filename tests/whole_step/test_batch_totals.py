"""Losses that are divided by numbers of the batch, such as its targets, are those of the whole batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.parity import batch_shard, compare
from tests.support.small_models import hf_llama

CLASSES, WIDTH, LENGTH, IGNORED = 7, 6, 5, -100


class Tagger(nn.Module):
    """A class for each token, and the sum of losses that are divided by several numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("class_weights", torch.arange(1.0, CLASSES + 1))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.last(self.first(x).relu())
        return torch.stack([loss(logits, labels, self.class_weights) for loss in LOSSES]).sum()


def per_token(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def masked_mean(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of all tokens, zero where ignored, and which count."""
    return per_token(logits, labels, reduction="none"), (labels.flatten() != IGNORED).float()


def by_clamped_sum(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    losses, counts = masked_mean(logits, labels)
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def by_number(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    losses, counts = masked_mean(logits, labels)
    return losses.sum() / counts.sum().item()


def by_integer(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return per_token(logits, labels, reduction="sum") * 2 / (labels[:, 1:] != IGNORED).sum() + logits.square().mean()


LOSSES: Sequence[Callable[..., Tensor]] = (
    lambda logits, labels, _: functional.cross_entropy(logits.transpose(1, 2), labels),
    lambda logits, labels, weights: per_token(logits, labels, weight=weights),
    lambda logits, labels, weights: per_token(logits, labels, label_smoothing=0.1),
    lambda logits, labels, _: functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    by_clamped_sum,
    by_number,
    by_integer,
)


def uneven_batch(rows: int) -> dict[str, Tensor]:
    """In the first row every label counts, in the second none, and in each of the others some."""
    labels = torch.randint(0, CLASSES, (rows, LENGTH))
    for row in range(1, rows):
        labels[row, (0 if row == 1 else row % LENGTH) :] = IGNORED
    return {"x": torch.randn(rows, LENGTH, WIDTH), "labels": labels}


def check_losses(sizes: Mapping[str, int], microbatches: int) -> None:
    """Compare steps and an evaluation with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    _check(Tagger(), uneven_batch(4 * fxpar.num_batch_shards(mesh)), mesh, microbatches, "last")


def check_llama(sizes: Mapping[str, int], microbatches: int) -> None:
    """As `check_losses`, for a model of transformers with padding on the right."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    tokens = torch.randint(0, 90, (4 * fxpar.num_batch_shards(mesh), 12))
    mask = torch.arange(12) < torch.tensor([[12], [3], [7], [2]]).repeat(len(tokens) // 4, 1)
    whole = {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, IGNORED)}
    _check(hf_llama(), whole, mesh, microbatches, "model.layers.1")


def _check(alone: nn.Module, whole: Mapping[str, Tensor], mesh: fxpar.Mesh, microbatches: int, opener: str) -> None:
    model, part = copy.deepcopy(alone), batch_shard(whole, mesh)
    stages = [opener][: mesh.pipe - 1]
    fxpar.distribute(model, mesh, stages=stages, microbatches=microbatches, example_inputs=part)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    for _ in range(2):
        expected, found = _loss(alone(**whole)), _loss(step(**part))
        expected.backward()
        found.backward()
        compare(f"on {mesh}", expected, found, alone, model)
    with torch.no_grad():
        torch.testing.assert_close(_loss(step(**part)), expected.detach(), rtol=1e-5, atol=0)


def _loss(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


@pytest.mark.parametrize(
    ("sizes", "microbatches"),
    [({"pipe": 2}, 2), ({"pipe": 2}, 4), ({"z": 2}, 1), ({"data": 2, "z": 2}, 4), ({"pipe": 2, "x": 2}, 4)],
    ids=str,
)
def test_a_loss_is_divided_by_the_number_of_the_whole_batch(sizes: dict[str, int], microbatches: int) -> None:
    run_ranks(math.prod(sizes.values()), check_losses, sizes, microbatches)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}], ids=str)
def test_padding_does_not_count_however_it_is_distributed(sizes: dict[str, int]) -> None:
    run_ranks(2, check_llama, sizes, 2)
