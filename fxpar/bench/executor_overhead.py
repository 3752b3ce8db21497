"""What the executor takes per instruction when there is next to nothing to compute or to send."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.launch import run_ranks
from fxpar.schedule import build_schedule, chain, lower

GOAL_US = 100.0
STAGES, MICROBATCHES, STEPS = 2, 64, 20


class Relay(nn.Module):
    """Stages of one multiplication of one number each, the least that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Scale() for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.sum()


class Scale(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def executor_overhead(say: Say) -> Iterator[tuple[Row, Bar]]:
    """The median step's time per instruction, messages and the wait for them included: an upper bound."""
    say("running empty stages")
    step_us = 1e6 * max(run_ranks(STAGES, step_seconds))
    schedule = build_schedule("1f1b", STAGES, MICROBATCHES)
    instructions = max(len(program.instructions) for program in lower(schedule, chain(STAGES)))
    row = {
        "pipe": STAGES,
        "microbatches": MICROBATCHES,
        "instructions": instructions,
        "step_us": step_us,
        "us_per_instruction": step_us / instructions,
    }
    yield row, at_most("executor overhead, microseconds per instruction", step_us / instructions, GOAL_US)


def step_seconds() -> float:
    """The median over steps on this rank; runs in a process of its own."""
    mesh = fxpar.init_mesh(pipe=STAGES)
    model = Relay()
    x = torch.ones(MICROBATCHES, 1)
    fxpar.distribute(model, mesh, stages=["stages.1"], microbatches=MICROBATCHES, schedule="1f1b", example_inputs=(x,))
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    step(x).backward()
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        step(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
