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
STAGES, MICROBATCHES, STEPS = 2, 64, 50


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
    """What one instruction takes of the thread that runs the program; beside it, from the clock of the fastest step.

    The clock also counts how long messages are under way, and whatever else the machine runs.
    """
    say("running empty stages")
    by_rank = run_ranks(STAGES, time_steps)
    schedule = build_schedule("1f1b", STAGES, MICROBATCHES)
    instructions = max(len(program.instructions) for program in lower(schedule, chain(STAGES)))
    busy_us, clock_us = (1e6 * max(seconds) / instructions for seconds in zip(*by_rank, strict=True))
    row: Row = {
        "pipe": STAGES,
        "microbatches": MICROBATCHES,
        "instructions": instructions,
        "busy_us_per_instruction": busy_us,
        "clock_us_per_instruction": clock_us,
    }
    yield row, at_most("executor overhead, microseconds per instruction", busy_us, GOAL_US)


def time_steps() -> tuple[float, float]:
    """Seconds of a step on this rank: the thread's own, as a median, and the clock's least; in a process of its own."""
    mesh = fxpar.init_mesh(pipe=STAGES)
    model = Relay()
    x = torch.ones(MICROBATCHES, 1)
    fxpar.distribute(model, mesh, stages=["stages.1"], microbatches=MICROBATCHES, schedule="1f1b", example_inputs=(x,))
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    step(x).backward()
    busy, clock = [], []
    for _ in range(STEPS):
        dist.barrier()
        busy_start, clock_start = time.thread_time(), time.perf_counter()
        step(x)
        busy.append(time.thread_time() - busy_start)
        clock.append(time.perf_counter() - clock_start)
    return statistics.median(busy), min(clock)
