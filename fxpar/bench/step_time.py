"""The time of a step against torch.distributed.pipelining: the same model, stages, microbatches and ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.bench.models import example
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.bench.torch_pipeline import torch_steps
from fxpar.bench.turns import Step, alternate
from fxpar.launch import run_ranks

GOAL = 1.0
STAGES, BATCH, MICROBATCHES = 4, 16, 8
WARM_UP, STEPS = 2, 20

COMPILED = ("fxpar, inductor", "Schedule1F1B, inductor")
EAGER = ("fxpar, aten", "Schedule1F1B, eager")


def step_time(say: Say) -> Iterator[tuple[Row, Bar | None]]:
    """Steps take turns, each timed on the rank that took longest; the bar holds the median ratio of a turn."""
    say(f"running the example GPT on pipe={STAGES}, in turns with torch.distributed.pipelining")
    by_rank = run_ranks(STAGES, take_turns, timeout_s=900)
    for pair in (COMPILED, EAGER):
        ours, theirs = ([max(turn) for turn in zip(*(rank[name] for rank in by_rank), strict=True)] for name in pair)
        ratio = statistics.median([mine / other for mine, other in zip(ours, theirs, strict=True)])
        bar = at_most(f"step time: {' / '.join(pair)}", ratio, GOAL)
        yield _row(pair[0], ours), bar if pair == COMPILED else None
        yield _row(pair[1], theirs), None


def _row(name: str, seconds: Sequence[float]) -> Row:
    median_ms, best_ms = 1e3 * statistics.median(seconds), 1e3 * min(seconds)
    return {
        "step": name,
        "pipe": STAGES,
        "microbatches": MICROBATCHES,
        "median_step_ms": median_ms,
        "fastest_step_ms": best_ms,
    }


def take_turns() -> Mapping[str, list[float]]:
    """Seconds of every step by name, on this of 4 ranks; runs in a process of its own."""
    steps = {
        COMPILED[0]: fxpar_step("inductor"),
        COMPILED[1]: torch_step(compiled=True),
        EAGER[0]: fxpar_step("aten"),
        EAGER[1]: torch_step(compiled=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in alternate(list(steps), WARM_UP + STEPS):
        dist.barrier()
        start = time.perf_counter()
        steps[name]()
        seconds[name].append(time.perf_counter() - start)
    return {name: found[WARM_UP:] for name, found in seconds.items()}


def fxpar_step(lowering: str) -> Step:
    """A step under fxpar's default schedule; every rank calls it."""
    mesh = fxpar.init_mesh(pipe=STAGES)
    model, batch, openers = _example()
    fxpar.distribute(model, mesh, stages=openers, microbatches=MICROBATCHES, example_inputs=batch)
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
    openers = [f"blocks.{stage * config.layers // STAGES}" for stage in range(1, STAGES)]
    return model, {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}, openers
