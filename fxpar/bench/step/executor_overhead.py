"""The overhead of the executor per instruction, with next to nothing to compute or send: in the time of its thread, and
in wall-clock time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

import fxpar
from fxpar.bench.measure.interleaved import (
    TRIES,
    Sample,
    all_disturbed,
    disturbance,
    median_ms,
    time_interleaved,
    timings_of_ranks,
)
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.schedule import build_schedule, chain, lower
from fxpar.world.launch import run_ranks

GOAL_US = 100.0
"""A tenth of the millisecond that the shortest action of a real stage takes."""

STAGES, MICROBATCHES = 2, 64
"""One message per microbatch and direction, as between any two stages; filling and draining take a thirtieth."""

STEPS, WARM_UP, REPEATS = 10, 1, 7
"""Ten steps together take a third of a second, since the processor time of others is counted in hundredths."""


class ScaleChain(nn.Module):
    """Stages of one scalar multiplication each, the least that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Scale() for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.sum()


class Scale(nn.Module):
    """Multiplication by one parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def executor_overhead(
    say: Say, steps: int = STEPS, repeats: int = REPEATS, tries: int = TRIES
) -> Iterator[tuple[Row, Bar]]:
    """Medians of the time per instruction: of the thread that runs the program, and by the clock.

    The clock also counts the latency of messages, and the time that a rank waits for the other one.
    """
    say("running empty stages")
    by_rank = run_ranks(STAGES, time_steps, steps, repeats, tries)
    schedule = build_schedule("1f1b", STAGES, MICROBATCHES)
    instructions = max(len(program.instructions) for program in lower(schedule, chain(STAGES)))
    (timings,) = timings_of_ranks([samples for samples, _ in by_rank]).values()
    busy_s, clock_s = max(busy_s for _, busy_s in by_rank), median_ms(timings) / 1e3
    for what, seconds in (("its thread's time", busy_s), ("the clock", clock_s)):
        us = 1e6 * seconds / steps / instructions
        row: Row = {
            "executor by": what,
            "pipe": STAGES,
            "microbatches": MICROBATCHES,
            "instructions": instructions,
            "us_per_instruction": us,
            **disturbance(timings),
        }
        name = f"executor overhead by {what}, microseconds per instruction"
        yield row, at_most(name, us, GOAL_US, disturbed=all_disturbed(timings))


def time_steps(steps: int, repeats: int, tries: int) -> tuple[Mapping[str, Sequence[Sample]], float]:
    """Samples of `steps` steps each on this rank, and the median of their thread time; in a process of its own."""
    mesh = fxpar.init_mesh(pipe=STAGES)
    model = ScaleChain()
    x = torch.ones(MICROBATCHES, 1)
    fxpar.distribute(model, mesh, stages=["stages.1"], microbatches=MICROBATCHES, schedule="1f1b", example_inputs=(x,))
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    step(x).backward()
    busy: list[float] = []

    def run() -> None:
        start = time.thread_time()
        for _ in range(steps):
            step(x)
        busy.append(time.thread_time() - start)

    samples = time_interleaved({"steps": run}, WARM_UP, repeats, tries)
    return samples, statistics.median(busy)
