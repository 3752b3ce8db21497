"""A script may compute its loss of what the forward returns: gradients are those of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxpar
from fxpar.errors import InvalidOptionError, NoLossError, NotTheLossError, OutsideLossWarning
from fxpar.world.launch import run_ranks
from tests.support.derivations import note_derivations
from tests.support.one_process import ATEN, mesh_of_one_process

VOCABULARY, HIDDEN, ROWS, LENGTH, STEPS = 24, 8, 8, 5, 2

Forward: TypeAlias = Callable[[Tensor], Any]
LossOf: TypeAlias = Callable[[Forward, Tensor, Tensor], Tensor]

mesh = pytest.fixture(mesh_of_one_process)


class Scorer(nn.Module):
    """Scores of the next token, by a matrix that is also the embedding; returns them as `form` says."""

    def __init__(self, form: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.scores = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.scores.weight = self.embedding.weight
        self.dropout, self.form = nn.Dropout(dropout), form
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Any:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + self.dropout(layer(h)).tanh()
        self.steps += 1
        scores = self.scores(h / self.steps.clone())
        match self.form:
            case "dict":
                return {"scores": scores, "beside": [h, scores.argmax(-1)]}
            case "samples second":
                return scores.transpose(0, 1)
            case "beside a loss":
                return {"loss": h.square().mean(), "scores": scores}
            case "of all samples":
                return scores, h.mean((0, 1))
        return scores


def entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _of_dict(forward: Forward, tokens: Tensor, targets: Tensor) -> Tensor:
    results = forward(tokens)
    return entropy(results["scores"], targets) + results["beside"][0].abs().mean()


def _of_two_calls(forward: Forward, tokens: Tensor, targets: Tensor) -> Tensor:
    first, second = forward(tokens), forward(tokens.flip(1))
    return entropy(first, targets) + (first - second).square().mean()


def _of_both(forward: Forward, tokens: Tensor, targets: Tensor) -> Tensor:
    results = forward(tokens)
    loss: Tensor = results["loss"] + entropy(results["scores"], targets)
    return loss


def _of_changed_scores(forward: Forward, tokens: Tensor, targets: Tensor) -> Tensor:
    scores = forward(tokens)
    scores += 1.0
    scores[:, 0] = 0.0
    return entropy(scores, targets)


def _contrastive(forward: Forward, tokens: Tensor, targets: Tensor) -> Tensor:
    """Compares all samples of a batch shard with each other."""
    scores = forward(tokens).mean(1)
    return F.cross_entropy(scores @ scores.mT, torch.arange(len(scores)))


LOSSES: Mapping[str, tuple[str, LossOf]] = {
    "scores": ("", lambda forward, tokens, targets: entropy(forward(tokens), targets)),
    "dict": ("dict", _of_dict),
    "samples second": ("samples second", lambda forward, x, y: entropy(forward(x), y.mT)),
    "two calls": ("", _of_two_calls),
    "beside a loss": ("beside a loss", _of_both),
    "changed scores": ("", _of_changed_scores),
    "contrastive": ("", _contrastive),
}


def check(sizes: Mapping[str, int], microbatches: int, name: str) -> None:
    """Steps on a mesh equal those of one process, which computes batch shards one after another."""
    form, loss_of = LOSSES[name]
    mesh = fxpar.init_mesh(**sizes)
    shards, rank = fxpar.num_batch_shards(mesh), fxpar.batch_rank(mesh)
    torch.manual_seed(0)
    model = Scorer(form)
    alone = copy.deepcopy(model)
    stages = ["layers.1"] if mesh.pipe > 1 else []
    example = (torch.zeros(ROWS // shards, LENGTH, dtype=torch.long),)
    fxpar.distribute(model, mesh, stages=stages, microbatches=microbatches, example_inputs=example)
    step = torch.compile(model, backend="fxpar", options={**ATEN, "results": "local"})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for _ in range(STEPS):
        tokens, targets = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH))
        loss = loss_of(step, tokens.chunk(shards)[rank], targets.chunk(shards)[rank])
        loss.backward()
        expected = _in_shards(alone, loss_of, tokens, targets, shards)
        if form != "beside a loss":  # of which the loss of the forward is that of all shards
            torch.testing.assert_close(loss, expected[rank])
        torch.stack(expected).mean().backward()
        _compare(model, alone)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _in_shards(alone: nn.Module, loss_of: LossOf, tokens: Tensor, targets: Tensor, shards: int) -> list[Tensor]:
    """The loss of each shard by one process, where each counts the step alike."""
    losses, before = [], alone.steps.clone()
    for each in zip(tokens.chunk(shards), targets.chunk(shards), strict=True):
        alone.steps = before.clone()  # autograd keeps those of earlier shards
        losses.append(loss_of(alone, *each))
    return losses


def _compare(model: nn.Module, alone: nn.Module) -> None:
    for path, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), path
        expected = alone.get_parameter(path).grad
        torch.testing.assert_close(
            parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-6, msg=lambda m, p=path: f"{p}: {m}"
        )


STAGES_AND_WEIGHTS, STAGES_AND_SHARDS, SHARDS = {"pipe": 2, "x": 2}, {"pipe": 2, "z": 2}, {"data": 2}
CASES = [
    *((STAGES_AND_WEIGHTS, 2, name) for name in ("scores", "dict", "beside a loss")),
    *((STAGES_AND_SHARDS, 4, name) for name in ("samples second", "two calls", "contrastive")),
    *((SHARDS, 1, name) for name in LOSSES),
]


@pytest.mark.parametrize(("sizes", "microbatches", "name"), CASES, ids=str)
def test_losses_of_results_train_as_on_one_process(sizes: Mapping[str, int], microbatches: int, name: str) -> None:
    run_ranks(2 * len(sizes), check, sizes, microbatches, name)


def distributed(mesh: fxpar.Mesh, form: str = "", dropout: float = 0.0, **options: Any) -> tuple[nn.Module, Forward]:
    """The model, and its step, in one process."""
    torch.manual_seed(0)
    model = fxpar.distribute(Scorer(form, dropout), mesh, microbatches=2)
    return model, torch.compile(model, backend="fxpar", options={**ATEN, **options})


def some_tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH))


def test_the_backward_draws_the_random_numbers_of_its_own_forward(mesh: fxpar.Mesh) -> None:
    """The gradient of the scores' weight, which is not tied here, has the hidden values that the scores came of."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(HIDDEN, HIDDEN, bias=False)
            nn.init.eye_(self.linear.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.dropout(x))  # type: ignore[no-any-return]

    model = fxpar.distribute(Dropped(), mesh, microbatches=2)
    step, ones = torch.compile(model, backend="fxpar", options=ATEN), torch.ones(ROWS, HIDDEN)
    first, second = step(ones), step(ones)
    assert not torch.equal(first, second)
    weights = torch.randn(ROWS, HIDDEN)
    for dropped in (second, first):  # in the other order
        (gradient,) = torch.autograd.grad((dropped * weights).sum(), [model.linear.weight])
        torch.testing.assert_close(gradient.full_tensor(), weights.mT @ dropped.detach())


def test_buffers_change_once_for_a_forward_and_its_backward(mesh: fxpar.Mesh) -> None:
    model, step = distributed(mesh)
    losses = [step(some_tokens()).sum() for _ in range(2)]
    losses[0].backward()
    assert model.steps == 2
    losses[1].backward()
    assert model.steps == 2


def test_a_backward_may_run_again_as_with_any_graph(mesh: fxpar.Mesh) -> None:
    model, step = distributed(mesh)
    loss = step(some_tokens()).square().sum()
    loss.backward(retain_graph=True)
    once = model.embedding.weight.grad.full_tensor().clone()
    loss.backward()
    torch.testing.assert_close(model.embedding.weight.grad.full_tensor(), 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("changed", ["tokens", "a parameter"])
def test_a_change_in_place_before_the_backward_is_noticed(mesh: fxpar.Mesh, changed: str) -> None:
    model, step = distributed(mesh)
    tokens = some_tokens()
    loss = step(tokens).square().sum()
    with torch.no_grad():
        _ = tokens.zero_() if changed == "tokens" else model.layers[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_evaluation_runs_the_forwards_of_the_training(mesh: fxpar.Mesh) -> None:
    model, step = distributed(mesh)
    tokens = some_tokens()
    scores = step(tokens).detach()
    derived = note_derivations()
    model.steps.zero_()
    with torch.no_grad():
        evaluated = step(tokens)
    assert type(evaluated) is Tensor
    torch.testing.assert_close(evaluated, scores)
    assert not derived


def test_it_is_said_that_the_forward_runs_twice(mesh: fxpar.Mesh) -> None:
    _, step = distributed(mesh)
    with pytest.warns(OutsideLossWarning, match="fxpar.add_loss"):
        step(some_tokens())
    _, step = distributed(mesh, "beside a loss", results="local")
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutsideLossWarning)
        results = step(some_tokens())
        results["loss"].backward()
    with pytest.warns(OutsideLossWarning):
        results["scores"].sum().backward()


def test_a_frozen_model_evaluates_with_grad_as_without(mesh: fxpar.Mesh) -> None:
    """As the teacher of another model does."""
    teacher = Scorer("").requires_grad_(False).eval()
    alone = copy.deepcopy(teacher)
    step = torch.compile(fxpar.distribute(teacher, mesh, microbatches=2), backend="fxpar", options=ATEN)
    tokens = some_tokens()
    scores = step(tokens)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, alone(tokens))


def test_what_cannot_be_differentiated_is_an_error(mesh: fxpar.Mesh) -> None:
    _, step = distributed(mesh, results="all")
    with pytest.raises(InvalidOptionError, match="'local', since the forward returns no loss"):
        step(some_tokens())

    class Spread(Scorer):
        def forward(self, tokens: Tensor) -> Any:
            scores = super().forward(tokens)
            return (scores, scores.std(0)) if self.form == "beside" else scores.std(0)

    model = fxpar.distribute(Spread("beside"), mesh, microbatches=2)
    scores, spread = torch.compile(model, backend="fxpar", options=ATEN)(some_tokens())
    scores.sum().backward(retain_graph=True)
    with pytest.raises(NotTheLossError, match="result 1 of the forward"):
        spread.sum().backward()
    model = fxpar.distribute(Spread(""), mesh, microbatches=2)
    with pytest.raises(NoLossError, match=r"scalar loss.*it returned"):
        torch.compile(model, backend="fxpar", options=ATEN)(some_tokens())
