"""Ranks that are called with different shapes, as by an uneven sampler, get errors, and do not wait."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.model.distribution import distribution_of_model
from fxpar.world import uneven_calls
from fxpar.world.launch import run_ranks
from tests.support.mistakes import message_of
from tests.support.one_process import ATEN


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


def call_unevenly(sizes: dict[str, int], alone: str, told: Path) -> list[str]:
    """Two steps alike, then rank 1 makes another call, as `alone` says: its errors. For `run_ranks`."""
    uneven_calls.LONG_S = uneven_calls.GRACE_S = 0.2
    mesh = fxpar.init_mesh(**sizes)
    stages = ["second"][: mesh.pipe - 1]
    model = fxpar.distribute(Layers(), mesh, stages=stages, example_inputs=(torch.zeros(4, 8),))
    step = torch.compile(model, backend="fxpar", options={**ATEN, "check_inputs": False})

    def evaluate() -> None:
        with torch.no_grad():
            step(torch.ones(4, 8))

    def train(rows: int = 4) -> None:
        step(torch.ones(rows, 8)).backward()

    if alone == "evaluates again":
        evaluate()
    if mesh.rank == 0:
        sys.stderr = told.open("w")
    else:
        uneven_calls.GRACE_S = 60.0  # rank 0 is the one to end
    other = (lambda: train(3)) if alone == "has fewer rows" else evaluate
    return [message_of(call) for call in (train, train, other if mesh.rank == 1 else train)]


@pytest.mark.parametrize("sizes", [{"z": 2}, {"pipe": 2}], ids=str)
@pytest.mark.parametrize(
    ("alone", "what"),
    [("has fewer rows", "training step for microbatches of x: float32 (3, 8)"), ("evaluates", "evaluation")],
)
def test_different_calls_are_an_error_on_every_rank(
    sizes: dict[str, int], alone: str, what: str, tmp_path: Path
) -> None:
    ((*fine, message),) = run_ranks(2, call_unevenly, sizes, alone, tmp_path / "told", doomed=[0])
    assert fine == ["", ""]
    runs = ", but rank 0 runs the training step for microbatches of x: float32 (4, 8): expected the same calls on all"
    assert message.startswith(f"UnevenCallsError: this rank is to compile the {what}"), message
    assert runs in message
    said = (tmp_path / "told").read_text()
    assert f"UnevenCallsError: rank 1 is to compile the {what}" in said
    assert runs in said


def test_of_ranks_that_run_different_steps_one_ends_with_a_message(tmp_path: Path) -> None:
    ((*_, message),) = run_ranks(2, call_unevenly, {"pipe": 2}, "evaluates again", tmp_path / "told", doomed=[0])
    assert message.startswith("PeerLostError: lost "), message
    assert "UnevenCallsError: rank 1 runs the evaluation for" in (tmp_path / "told").read_text()


def compile_late() -> tuple[bool, bool]:
    """Rank 1 looks, in a step that rank 0 has left to compile the next one; then it compiles, too. For `run_ranks`."""
    uneven_calls.LONG_S, uneven_calls.GRACE_S = 0.1, 0.0
    mesh = fxpar.init_mesh(z=2)
    model = fxpar.distribute(Layers(), mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    first, watch = step(torch.ones(4, 8)), distribution_of_model(model, "a test").calls
    with watch.running("a step of both"):
        while mesh.rank == 1 and not is_compiled_on_rank_0(model):
            time.sleep(uneven_calls.LONG_S)
        watch.look()
    return bool(first.isfinite()), bool(step(torch.ones(2, 8)).isfinite())


def is_compiled_on_rank_0(model: nn.Module) -> bool:
    """Whether rank 0 has announced that it compiles a second time."""
    store = distribution_of_model(model, "a test").calls._store()
    assert store is not None
    return int(json.loads(store.get(uneven_calls._ANNOUNCED))["number"]) == 2


def test_a_rank_that_is_late_is_waited_for() -> None:
    assert run_ranks(2, compile_late) == [(True, True)] * 2
