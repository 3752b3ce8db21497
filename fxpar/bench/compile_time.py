"""How long the example GPT compiles on 4 ranks, against Inductor in one process; both with empty caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar.bench.models import example
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.launch import run_ranks

GOAL = 1.5
BATCH, MICROBATCHES = 16, 8


def compile_time(say: Say) -> Iterator[tuple[Row, Bar | None]]:
    """The time from an eager model to a step that is ready, without that step's own time."""
    say("compiling the example GPT for pipe=2 × x=2")
    ours = max(_cold(4, compile_on_mesh))
    say("compiling the example GPT for one process")
    (theirs,) = _cold(1, compile_alone)
    yield {"compiler": "fxpar", "pipe": 2, "x": 2, "ranks": 4, "compile_s": ours}, None
    bar = at_most("compile time on 4 ranks / Inductor's in one process", ours / theirs, GOAL)
    yield {"compiler": "inductor", "pipe": 1, "x": 1, "ranks": 1, "compile_s": theirs}, bar


def _cold(num_ranks: int, work: Callable[[], float]) -> list[float]:
    with TemporaryDirectory() as folder:
        return run_ranks(num_ranks, work, environment={"TORCHINDUCTOR_CACHE_DIR": folder}, timeout_s=900)


def compile_on_mesh() -> float:
    """Seconds on this of 4 ranks; runs in a process of its own."""
    mesh = fxpar.init_mesh(pipe=2, x=2)
    model, batch = _model_and_batch()
    start = time.perf_counter()
    fxpar.distribute(model, mesh, layouts=example("train_gpt").HINTS, microbatches=MICROBATCHES, example_inputs=batch)
    return _until_ready(torch.compile(model, backend="fxpar"), batch, start)


def compile_alone() -> float:
    """Seconds in one process, for a microbatch's worth of rows; runs in a process of its own."""
    model, batch = _model_and_batch()
    microbatch = [tensor[: BATCH // MICROBATCHES] for tensor in batch]
    return _until_ready(torch.compile(model, backend="inductor"), microbatch, time.perf_counter())


def _until_ready(step: Callable[..., Tensor], batch: Any, start: float) -> float:
    step(*batch).backward()
    ready = time.perf_counter()
    step(*batch).backward()
    return (ready - start) - (time.perf_counter() - ready)


def _model_and_batch() -> tuple[nn.Module, list[Tensor]]:
    gpt = example("gpt")
    config = gpt.Config()
    tokens = torch.randint(config.vocabulary, (BATCH, config.context + 1))
    return gpt.GPT(config), [tokens[:, :-1], tokens[:, 1:]]
