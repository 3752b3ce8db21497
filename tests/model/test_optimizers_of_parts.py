"""Optimizers of parts of a model, which on a pipeline have no parameter on some ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN


class Adversaries(nn.Module):
    """One makes samples, the other tells them from real ones; both losses, of which each step takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, noise: Tensor, real: Tensor, whose: str) -> Tensor:
        made = self.maker(noise)
        if whose == "judge":
            return nn.functional.softplus(self.judge(made.detach()) - self.judge(real)).mean()
        return nn.functional.softplus(-self.judge(made)).mean()


def _optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    judged = (each for each in model.judge.parameters() if each.requires_grad)
    return {
        "judge": torch.optim.AdamW(judged, lr=0.02, eps=1e-3),
        "maker": torch.optim.SGD(list(model.maker.parameters()), lr=0.1, momentum=0.9),
    }


def _train(step: Any, optimizers: dict[str, torch.optim.Optimizer], numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        noise, real = (torch.randn(8, 4, generator=generator) for _ in range(2))
        whose = "maker" if number % 2 else "judge"
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        step(noise, real, whose).backward()
        optimizers[whose].step()


def _distributed() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    mesh, model = fxpar.init_mesh(pipe=2), Adversaries()
    example = torch.randn(8, 4), torch.randn(8, 4), "judge"
    fxpar.distribute(model, mesh, stages=["judge"], microbatches=2, example_inputs=example)
    return model, torch.compile(model, backend="fxpar", options=ATEN)


def check_parts(folder: Path) -> None:
    """Train, save, go on with a new model and what was saved. For `run_ranks`."""
    torch.manual_seed(0)
    alone = Adversaries()
    _train(copy.deepcopy(alone), _optimizers(alone), range(0))
    _train(alone, _optimizers(alone), range(4))
    model, step = _distributed()
    optimizers = _optimizers(model)
    assert sum(not each.param_groups[0]["params"] for each in optimizers.values()) == 1
    _train(step, optimizers, range(2))
    for name, optimizer in optimizers.items():
        dcp.save(
            {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=folder / name,
        )
    again, step = _distributed()
    optimizers = _optimizers(again)
    for name, optimizer in optimizers.items():
        state: dict[str, Any] = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, optimizer)}
        dcp.load(state, checkpoint_id=folder / name)
        again.load_state_dict(state["model"])
        set_optimizer_state_dict(again, optimizer, state["optimizer"])
    _train(step, optimizers, range(2, 4))
    expected = alone.state_dict()
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name])  # type: ignore[operator]


def test_optimizers_of_single_stages_train_save_and_load(tmp_path: Path) -> None:
    run_ranks(2, check_parts, tmp_path)


def check_empty_list() -> None:
    """No pipeline explains it. For `run_ranks`, as models of other tests may be alive."""
    fxpar.distribute(nn.Linear(2, 2), fxpar.init_mesh(z=2))
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD([], lr=0.1)


def test_an_empty_list_stays_an_error_where_no_pipeline_explains_it() -> None:
    run_ranks(2, check_empty_list)
