"""The time of a step against torch.distributed.pipelining: the same model, stages, microbatches and ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import fxpar
from fxpar.bench.models import example
from fxpar.bench.report import Bar, Row, Say, at_most
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
    model, tokens, targets = _example()
    stages = [f"blocks.{stage * len(model.blocks) // STAGES}" for stage in range(1, STAGES)]
    fxpar.distribute(model, mesh, stages=stages, microbatches=MICROBATCHES, example_inputs=(tokens, targets))
    compiled: Callable[..., Tensor] = torch.compile(model, backend="fxpar", options={"lowering": lowering})

    def step() -> None:
        model.zero_grad()
        compiled(tokens, targets).backward()

    return step


def torch_step(*, compiled: bool) -> Step:
    """A step under torch's 1F1B; every rank calls it."""
    model, tokens, targets = _example()
    rank = dist.get_rank()
    part = _Part(model, rank)
    if compiled:
        part.compile()
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.compile(_loss) if compiled else _loss)
    inputs = (tokens,) if stage.is_first else ()

    def step() -> None:
        part.zero_grad()
        schedule.step(*inputs, target=targets if stage.is_last else None, return_outputs=False)

    return step


class _Part(nn.Module):
    """What a stage has of the example GPT."""

    def __init__(self, model: Any, stage: int) -> None:
        super().__init__()
        per_stage = len(model.blocks) // STAGES
        self.blocks = model.blocks[stage * per_stage : (stage + 1) * per_stage]
        self.embeddings = nn.ModuleList([model.tokens, model.positions] if stage == 0 else [])
        self.head = nn.Sequential(*[model.norm, model.head] if stage == STAGES - 1 else [])

    def forward(self, x: Tensor) -> Tensor:
        if self.embeddings:
            tokens, positions = self.embeddings
            x = tokens(x) + positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _example() -> tuple[Any, Tensor, Tensor]:
    """The example GPT with a batch of tokens and targets, the same on every rank."""
    gpt = example("gpt")
    config = gpt.Config()
    torch.manual_seed(0)
    model = gpt.GPT(config)
    ids = torch.randint(config.vocabulary, (BATCH, config.context + 1))
    return model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
