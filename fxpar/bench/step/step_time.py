"""The time of a step against torch.distributed.pipelining: the same model, stages, microbatches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

import fxpar
from fxpar.bench.measure.interleaved import (
    Sample,
    Step,
    Timing,
    all_disturbed,
    disturbance,
    median_ms,
    median_ratio,
    time_interleaved,
    timings_of_ranks,
)
from fxpar.bench.models import example
from fxpar.bench.pipeline.torch_pipeline import torch_steps
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.world.launch import run_ranks

GOAL = 1.0

STAGES, BATCH, MICROBATCHES = 4, 16, 8
"""Sizes of the example: two microbatches per stage, of two sequences each."""

WARM_UP, REPEATS = 2, 20
"""The first step compiles, and the second still allocates. A step takes below a second: twenty are quickly done."""

COMPILED = ("fxpar, inductor", "Schedule1F1B, inductor")
EAGER = ("fxpar, aten", "Schedule1F1B, eager")


def step_time(say: Say) -> Iterator[tuple[Row, Bar | None]]:
    """Steps alternate, each timed until its last rank ends; the bar is of the median ratio per round."""
    say(f"running the example GPT on pipe={STAGES}, in turns with torch.distributed.pipelining")
    timings = timings_of_ranks(run_ranks(STAGES, run_steps, timeout_s=900))
    for pair in (COMPILED, EAGER):
        ratio, disturbed = median_ratio(timings, *pair), all_disturbed(*(timings[name] for name in pair))
        bar = at_most(f"step time: {' / '.join(pair)}", ratio, GOAL, disturbed=disturbed)
        yield _row(pair[0], timings[pair[0]]), bar if pair == COMPILED else None
        yield _row(pair[1], timings[pair[1]]), None


def _row(name: str, timings: Sequence[Timing]) -> Row:
    return {
        "step": name,
        "pipe": STAGES,
        "microbatches": MICROBATCHES,
        "median_step_ms": median_ms(timings),
        "fastest_step_ms": 1e3 * min(timing.seconds for timing in timings),
        **disturbance(timings),
    }


def run_steps() -> Mapping[str, Sequence[Sample]]:
    """Time the steps of both; each of 4 ranks calls it, in a process of its own."""
    steps = {
        COMPILED[0]: fxpar_step("inductor"),
        COMPILED[1]: torch_step(compiled=True),
        EAGER[0]: fxpar_step("aten"),
        EAGER[1]: torch_step(compiled=False),
    }
    return time_interleaved(steps, WARM_UP, REPEATS)


def fxpar_step(lowering: str) -> Step:
    """A step under fxpar's default schedule; every rank calls it."""
    mesh = fxpar.init_mesh(pipe=STAGES)
    model, batch, boundaries = _example()
    fxpar.distribute(model, mesh, stages=boundaries, microbatches=MICROBATCHES, example_inputs=batch)
    compiled: Callable[..., Tensor] = torch.compile(model, backend="fxpar", options={"lowering": lowering})

    def step() -> None:
        model.zero_grad()
        compiled(**batch).backward()

    return step


def torch_step(*, compiled: bool) -> Step:
    """A step under torch's 1F1B; every rank calls it."""
    return torch_steps(*_example(), MICROBATCHES, compiled=compiled)["Schedule1F1B"]


def _example() -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """The example GPT, a batch of tokens and targets, the same on every rank, and the blocks that open its stages."""
    gpt = example("gpt")
    config = gpt.Config()
    torch.manual_seed(0)
    model: nn.Module = gpt.GPT(config)
    ids = torch.randint(config.vocabulary, (BATCH, config.context + 1))
    boundaries = [f"blocks.{stage * config.layers // STAGES}" for stage in range(1, STAGES)]
    return model, {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}, boundaries
