"""Random forwards with branches on values of tensors compute what they compute in eager mode, or are refused."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import FxparError
from tests.support.branch_programs import program
from tests.support.one_process import ATEN, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)

ROWS, WIDTH, PROGRAMS = 8, 4, 24

LEAST_RIGHT = 8
"""Programs that train, of PROGRAMS: most of the others change a variable that may be another one's."""

KINDS = [[0, 1, 2, 1, 0, 0, 2, 1], [0] * ROWS, [1] * ROWS, [2] * ROWS, [2, 1, 1, 2, 2, 2, 1, 1]]


class Model(nn.Module):
    """What a program returns, and the hidden states that it may have changed, count for the loss."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.part = part

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        hidden = self.first(x)
        found = self.part(self, hidden, kinds)
        loss: Tensor = (self.last(hidden if found is None else found) + 0.3 * hidden).square().mean()
        return loss


def test_branches_compute_what_they_do_in_eager_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: fxpar.Mesh
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    right = [seed for seed in range(PROGRAMS) if _is_right(seed, tmp_path, mesh)]
    assert len(right) >= LEAST_RIGHT, f"of {PROGRAMS} programs, only {right} train"


def _is_right(seed: int, folder: Path, mesh: fxpar.Mesh) -> bool:
    """Whether a program trains as in eager mode; False if it is refused. What it computes otherwise is an error."""
    source, text = folder / f"program_{seed}.py", program(seed)
    source.write_text(text)
    torch.manual_seed(seed)
    alone, x = Model(importlib.import_module(source.stem).part), torch.randn(ROWS, WIDTH)
    model = fxpar.distribute(copy.deepcopy(alone), mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for kinds in KINDS:
        try:
            found = _losses_and_gradients(step, model, x, torch.tensor(kinds))
        except FxparError:
            return False
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), f"{source.read_text()}\n{error}"
            return False
        expected = _losses_and_gradients(alone, alone, x, torch.tensor(kinds))
        if not all(each.isfinite().all() for each in expected):
            return False
        for value, wanted in zip(found, expected, strict=True):
            error = float((value - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
            assert error < 1e-4, f"error {error:.1e} for kinds {kinds} in\n{text}"
    return True


def _losses_and_gradients(call: Any, model: nn.Module, x: Tensor, kinds: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = call(x, kinds)
    loss.backward()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return [loss.detach(), *(each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients)]
