"""Gradients are clipped by the norm of the model, however a script clips: over stages, shards and what is not there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import fxpar
from fxpar.errors import OptimizerAcrossStagesError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard


class Net(nn.Module):
    """Four layers; the last shares the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + (number + 1) * layer(x).tanh()
        return x.square().mean()


Clip = Callable[[nn.Module], Iterable[Tensor]]
"""Clips a model's gradients, and gives the norms that are the same on every rank."""


def all_at_once(model: nn.Module) -> list[Tensor]:
    return [clip_grad_norm_(model.parameters(), 0.1)]


def by_ours(model: nn.Module) -> list[Tensor]:
    return [fxpar.clip_grad_norm_(model.parameters(), 0.1)]


def by_largest(model: nn.Module) -> list[Tensor]:
    return [clip_grad_norm_(list(model.parameters()), 1e-3, norm_type=math.inf)]


def by_total_norm(model: nn.Module) -> list[Tensor]:
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return [norm]


def norms_of_weights(model: nn.Module) -> list[Tensor]:
    return [get_total_norm(model.parameters(), norm_type) for norm_type in (2.0, math.inf)]


def each_layer(model: nn.Module) -> list[Tensor]:
    return [clip_grad_norm_(layer.parameters(), 1e-3) for layer in model.get_submodule("layers").children()]


def each_parameter(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 1e-3)
    return []


def groups(model: nn.Module) -> list[Tensor]:
    return [clip_grad_norm_([p for p in model.parameters() if p.ndim == dims], 1e-2, 1.0) for dims in (1, 2)]


def with_another_parameter(model: nn.Module) -> list[Tensor]:
    """One that is outside of the model: all ranks have it, with one gradient."""
    scale = torch.ones(3, requires_grad=True)
    scale.grad = torch.tensor([0.1, -0.2, 0.3])
    norm = fxpar.clip_grad_norm_([*model.parameters(), scale], 0.1)  # PyTorch's takes no plain tensors with DTensors
    return [norm, scale.grad]


CLIPS: Mapping[str, Clip] = {
    each.__name__: each
    for each in (
        all_at_once,
        by_ours,
        by_largest,
        by_total_norm,
        norms_of_weights,
        each_layer,
        each_parameter,
        groups,
        with_another_parameter,
    )
}


def check_clips(sizes: Mapping[str, int]) -> None:
    """Clip in every way after one step. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    alone, model, step, whole, part = _distributed(mesh)
    for name, clip in CLIPS.items():
        for each in (alone, model):
            each.zero_grad()
        alone(**whole).backward()
        step(**part).backward()
        with torch.no_grad():
            wanted, found = clip(alone), clip(model)
        torch.testing.assert_close(list(found), list(wanted), msg=lambda text, name=name: f"{name}: {text}")
        expected = dict(alone.named_parameters())
        for path, parameter in model.named_parameters():
            torch.testing.assert_close(_whole(parameter.grad), _whole(expected[path].grad), msg=f"{name}: {path}")


def _distributed(mesh: fxpar.Mesh, *frozen: str) -> tuple[nn.Module, nn.Module, Any, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    alone = Net()
    for path, parameter in alone.named_parameters():
        parameter.requires_grad_(not path.startswith(frozen))
    model, whole = copy.deepcopy(alone), {"x": torch.randn(8, 8)}
    part = batch_shard(whole, mesh)
    stages = ["layers.2"][: mesh.pipe - 1]
    layouts = {"layers.*.weight": ("x", None)} if mesh.x > 1 else None
    fxpar.distribute(model, mesh, stages=stages, layouts=layouts, microbatches=2, example_inputs=part)
    return alone, model, torch.compile(model, backend="fxpar", options=ATEN), whole, part


def _whole(gradient: Any) -> Any:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.mark.parametrize("sizes", [{"x": 2}, {"pipe": 2}, {"z": 2}, {"pipe": 2, "data": 2}], ids=str)
def test_every_way_to_clip_equals_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_clips, sizes)


def check_frozen_stage() -> None:
    """All that the second stage holds is frozen: it has no gradients, but takes part. For `run_ranks`."""
    alone, model, step, whole, part = _distributed(fxpar.init_mesh(pipe=2), "layers.2", "layers.3")
    alone(**whole).backward()
    step(**part).backward()
    for trained in (list, lambda held: [each for each in held if each.requires_grad]):
        torch.testing.assert_close(
            clip_grad_norm_(trained(model.parameters()), 10.0), clip_grad_norm_(trained(alone.parameters()), 10.0)
        )
    norms = [get_total_norm([p.grad for p in m.parameters() if p.grad is not None]) for m in (model, alone)]
    torch.testing.assert_close(*norms)


def test_a_stage_without_gradients_takes_part() -> None:
    run_ranks(2, check_frozen_stage)


def check_refusals() -> tuple[str, str]:
    """What cannot be right on a pipeline. For `run_ranks`."""
    _, model, step, _, part = _distributed(fxpar.init_mesh(pipe=2))
    step(**part).backward()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(OptimizerAcrossStagesError) as across:
        optimizer.step(lambda: step(**part))
    next(model.parameters()).grad.to_local().fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError) as not_finite:
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    return str(across.value), str(not_finite.value)


def test_what_cannot_be_right_on_a_pipeline_is_an_error() -> None:
    for across, not_finite in run_ranks(2, check_refusals):
        assert across.startswith("LBFGS") and "2 parts" in across
        assert "expected a finite one" in not_finite


def check_anomalies() -> str:
    """Anomaly detection looks into the gradients of all parameters. For `run_ranks`."""
    _, model, step, _, part = _distributed(fxpar.init_mesh(z=2))
    with torch.autograd.set_detect_anomaly(True):
        step(**part).backward()
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
        with pytest.raises(RuntimeError) as found:
            step(**part).backward()
    return str(found.value)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_finds_nans_in_gradients() -> None:
    assert all("returned nan values" in message for message in run_ranks(2, check_anomalies))
