"""A line of the log says what was compiled, and why."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import run_ranks


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(re.sub(r"[0-9.]+ s\b", "TIME", record.getMessage()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def compile_for_several_reasons() -> list[str]:
    """The lines of this rank, as a launcher starts it."""
    os.environ["RANK"] = str(dist.get_rank())
    lines = Lines()
    logger = logging.getLogger("fxpar")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    model = Model()
    mesh = fxpar.init_mesh(pipe=2)
    fxpar.distribute(model, mesh, stages=["second"], microbatches=2)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    with torch.no_grad():
        step(torch.zeros(4, 4))
    for rows in (4, 8, 4, 8):
        step(torch.zeros(rows, 4)).backward()
    with torch.no_grad():
        step(torch.zeros(8, 4))
    torch.compile(model, backend="fxpar", options={"lowering": "aten", "check_inputs": False})(torch.zeros(8, 4))
    return lines.found


def test_the_first_rank_tells_what_was_compiled_and_why() -> None:
    first, second = run_ranks(2, compile_for_several_reasons)
    assert first == [
        "distributed Model over pipe=2 in TIME",
        "compiled the evaluation in TIME: the first of this model, microbatches of x: float32 (2, 4)",
        "compiled the training step in TIME: the first with gradients, microbatches of x: float32 (2, 4)",
        "compiled the training step in TIME: a new shape or dtype of inputs, microbatches of x: float32 (4, 4)",
        "took the forwards of the training step for the evaluation in TIME: the first without gradients, "
        "microbatches of x: float32 (4, 4)",
        "compiled the training step in TIME: other options, or another path through the forward, "
        "microbatches of x: float32 (4, 4)",
    ]
    assert second == []


def launch() -> str:
    """The last line of a launch that trains for one step."""
    lines = Lines()
    logger = logging.getLogger("fxpar")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    model = fxpar.distribute(Model(), fxpar.init_mesh(), example_inputs=(torch.zeros(4, 4),))
    torch.compile(model, backend="fxpar", options={"lowering": "aten"})(torch.zeros(4, 4))
    return lines.found[-1]


def test_a_later_launch_tells_that_it_compiled_nothing(tmp_path: Path) -> None:
    cache = {"FXPAR_CACHE_DIR": str(tmp_path)}
    (first,), (second,) = (run_ranks(1, launch, environment=cache) for _ in range(2))
    why = "in TIME: the first of this model, microbatches of x: float32 (4, 4)"
    assert first == f"compiled the training step {why}"
    assert second == f"loaded the training step that an earlier launch compiled {why}"
