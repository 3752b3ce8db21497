"""Scripts that give a model what another one, or it itself, has predicted: distillation, and policies that learn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.parity import batch_shard

WORDS, LENGTH, WIDTH = 16, 5, 8

Step: TypeAlias = Callable[..., Any]


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.leave = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def predict(self, tokens: Tensor) -> Tensor:
        return self.leave(self.mix(self.enter(tokens)).tanh())

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.predict(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Student(Teacher):
    def forward(self, tokens: Tensor, labels: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(tokens, labels)
        return loss + functional.mse_loss(logits, wanted), logits


class Policy(Teacher):
    """The clipped objective of PPO (Schulman et al., 2017, equation 7), and first the probabilities of a rollout."""

    def forward(self, tokens: Tensor, before: Tensor | None = None, advantages: Tensor | None = None) -> Any:
        taken = self.predict(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        if before is None or advantages is None:
            return taken
        ratio = (taken - before).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return {"loss": -gain.mean(), "divergence": (before - taken).detach().mean()}


def distil(teach: Step, learn: Step, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Two steps, and the hits of each."""
    found = []
    for tokens in (batch["tokens"], batch["tokens"].flip(1)):
        with torch.no_grad():
            _, wanted = teach(tokens, batch["labels"])
        loss, logits = learn(tokens, batch["labels"], wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), logits.argmax(-1) == batch["labels"]]
    return found


def learn_from_rollouts(act: Step, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Two steps after one rollout, whose probabilities the script computes with."""
    with torch.no_grad():
        before = act(batch["tokens"])
    advantages = batch["rewards"] - 0.1 * before
    found = []
    for _ in range(2):
        results = act(batch["tokens"], before, advantages)
        results["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [results["loss"].detach(), results["divergence"]]
    return found


def check_scripts(sizes: Mapping[str, int]) -> None:
    """Run both scripts on this mesh and on one process; compare what they find and have learnt. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    rows = 4 * fxpar.num_batch_shards(mesh)
    tokens, labels = torch.randint(0, WORDS, (2, rows, LENGTH))
    whole = {"tokens": tokens, "labels": labels, "rewards": torch.randn(rows, LENGTH - 1)}
    mine = batch_shard(whole, mesh)
    given = mine["tokens"], mine["labels"], torch.zeros(4, LENGTH, WORDS)
    teacher, student, policy = Teacher(), Student(), Policy()
    alone = [copy.deepcopy(model) for model in (teacher, student, policy)]
    steps = [
        _compiled(teacher, mesh, given[:2]),
        _compiled(student, mesh, given),
        _compiled(policy, mesh, (given[0], mine["rewards"], mine["rewards"])),
    ]
    found = distil(*steps[:2], _sgd(student), mine) + learn_from_rollouts(steps[2], _sgd(policy), mine)
    expected = distil(*alone[:2], _sgd(alone[1]), whole) + learn_from_rollouts(alone[2], _sgd(alone[2]), whole)
    for each, wanted in zip(found, expected, strict=True):
        of_shard = batch_shard({"hits": wanted}, mesh)["hits"] if wanted.dim() else wanted
        torch.testing.assert_close(each, of_shard, rtol=1e-5, atol=1e-6)
    for model, reference in ((student, alone[1]), (policy, alone[2])):
        weights = dict(reference.named_parameters())
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            torch.testing.assert_close(weight.full_tensor(), weights[name], rtol=1e-5, atol=1e-6)


def _compiled(model: nn.Module, mesh: fxpar.Mesh, given: tuple[Tensor, ...]) -> Step:
    fxpar.distribute(model, mesh, stages=["leave"][: mesh.pipe - 1], microbatches=2, example_inputs=given)
    return torch.compile(model, backend="fxpar", options={"lowering": "aten", "results": "local"})


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}], ids=str)
def test_scripts_compute_with_predictions_as_on_one_process(sizes: Mapping[str, int]) -> None:
    run_ranks(2, check_scripts, sizes)
