"""One trace serves training and evaluation, unless what the forward computes depends on the grad mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpar
from tests.support.derivations import note_derivations
from tests.support.one_process import ATEN, batch, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class Asking(nn.Module):
    """Does something with autograd, as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(6, 8), nn.Linear(8, 3), how

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.second(self._changed(self.first(x), x)) - target).square().mean()

    def _changed(self, h: Tensor, x: Tensor) -> Tensor:
        match self.how:
            case "grad mode":
                return 2 * h if torch.is_grad_enabled() else h
            case "requires_grad of a value":
                return 2 * h if h.requires_grad else h
            case "is_leaf of a value":
                return 2 * h if h.is_leaf else h
            case "requires_grad where grad is enabled":
                with torch.enable_grad():
                    return 2 * h if self.first(x).requires_grad else h
            case "requires_grad of a parameter":
                return 2 * h if self.second.weight.requires_grad else h
            case "requires_grad of an input":
                return 2 * h if not x.requires_grad else h
            case "regions with and without grad":
                with torch.enable_grad():
                    h = 2 * h
                with torch.set_grad_enabled(False), torch.inference_mode():
                    scale = x.mean()
                return h * scale.clone() / self._largest(h)
            case "autograd function":
                return Sine.apply(h)
            case "checkpoint":
                return checkpoint(lambda given: self.first(given).tanh(), x, use_reentrant=False)
        raise AssertionError(self.how)

    @torch.no_grad()
    def _largest(self, h: Tensor) -> Tensor:
        return h.abs().max()


def losses(mesh: fxpar.Mesh, how: str, modes: list[bool]) -> tuple[list[Tensor], list[Tensor], int]:
    """The losses of calls with and without grad, distributed and alone, and how often Dynamo traced the forward."""
    torch.manual_seed(0)
    model = Asking(how)
    alone, inputs = copy.deepcopy(model), batch(4)
    step = torch.compile(fxpar.distribute(model, mesh), backend="fxpar", options=ATEN)
    torch._dynamo.utils.counters.clear()
    found, expected = [], []
    for mode in modes:
        with torch.set_grad_enabled(mode):
            found.append(step(*inputs))
            expected.append(alone(*inputs))
    return found, expected, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


ORDERS = [[True, False, True, False], [False, True, False, True], [False, False]]


@pytest.mark.parametrize("modes", ORDERS)
@pytest.mark.parametrize(
    "how",
    ["grad mode", "requires_grad of a value", "is_leaf of a value", "requires_grad where grad is enabled"],
)
def test_a_forward_that_asks_for_the_grad_mode_is_traced_in_both(mesh: fxpar.Mesh, how: str, modes: list[bool]) -> None:
    found, expected, traces = losses(mesh, how, modes)
    torch.testing.assert_close(found, expected)
    assert traces == 2


@pytest.mark.parametrize("modes", ORDERS)
@pytest.mark.parametrize(
    "how",
    [
        "requires_grad of a parameter",
        "requires_grad of an input",
        "regions with and without grad",
        "autograd function",
        "checkpoint",
    ],
)
def test_any_other_forward_is_traced_once(mesh: fxpar.Mesh, how: str, modes: list[bool]) -> None:
    found, expected, traces = losses(mesh, how, modes)
    torch.testing.assert_close(found, expected)
    assert traces == 1


class BreaksWithGrad(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            torch._dynamo.graph_break()
        return super().forward(x).sum()


def test_a_forward_that_cannot_be_traced_with_grad_evaluates(mesh: fxpar.Mesh) -> None:
    model = BreaksWithGrad(6, 3)
    x, alone = batch(4)[0], copy.deepcopy(model)
    step = torch.compile(fxpar.distribute(model, mesh), backend="fxpar", options=ATEN)
    with torch.no_grad():
        torch.testing.assert_close(step(x), alone(x))
    with pytest.raises(fxpar.errors.GraphBreakError):
        step(x)
    with torch.no_grad():
        torch.testing.assert_close(step(x), alone(x))


class Mean(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


def test_an_evaluation_after_a_training_step_derives_nothing(mesh: fxpar.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in `eval()` mode, if that changes no operation."""
    derived = note_derivations(monkeypatch)
    model = fxpar.distribute(Mean(nn.Linear(6, 6), nn.ReLU()), mesh)
    step, x = torch.compile(model, backend="fxpar", options=ATEN), batch(4)[0]
    trained = step(x)
    assert derived
    derived.clear()

    @torch.no_grad()
    def evaluate() -> Tensor:
        return step(x)

    found = [evaluate(), evaluate()]
    with torch.inference_mode():
        found.append(step(x))
    model.eval()
    found.append(evaluate())
    assert derived == []
    for loss in found:
        assert torch.equal(loss, trained)
        assert not loss.requires_grad
    with torch.no_grad():
        other = torch.compile(model, backend="fxpar", options={**ATEN, "overlap": False})(x)
    assert derived, "no training step had these options"
    torch.testing.assert_close(other, trained.detach())
    derived.clear()
    with torch.no_grad():
        step(batch(6)[0])
    assert derived, "no training step had this shape"


def test_an_evaluation_by_training_graphs_changes_the_buffers_that_the_model_has_then(mesh: fxpar.Mesh) -> None:
    model = Mean(nn.Linear(6, 6), nn.BatchNorm1d(6))
    step, x = torch.compile(fxpar.distribute(model, mesh), backend="fxpar", options=ATEN), batch(4)[0]
    step(x)
    before = model[1].running_mean
    unchanged = before.clone()
    model[1].running_mean = torch.zeros(6)
    with torch.no_grad():
        step(x)
    assert torch.equal(before, unchanged)
    torch.testing.assert_close(model[1].running_mean, unchanged)
