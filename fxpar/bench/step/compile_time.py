"""The compile time of the example GPT on 4 ranks, against Inductor in one process; with empty caches, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar.bench.measure.interleaved import Timing, all_disturbed, disturbance, least_disturbed, median_ms, median_ratio
from fxpar.bench.measure.processors import ProcessorUse, share_of_others
from fxpar.bench.models import example
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.calibrate.network import alternate
from fxpar.world.launch import run_ranks

GOAL = 1.5

BATCH, MICROBATCHES = 16, 8
"""Sizes of the example: a compile has the two sequences of a microbatch."""

REPEATS, TRIES = 3, 2
"""The median of three compiles, of up to a minute each, tolerates one outlier; a disturbed one is repeated once."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """The number of ranks, the function that each rank calls, and the mesh, for the report."""

    ranks: int
    work: Callable[[], Compiled]
    pipe: int = 1
    x: int = 1


@dataclass(frozen=True, slots=True)
class Compiled:
    """The time, and the processor time of its process tree, until a rank's step was ready, without the step itself."""

    seconds: float
    used: ProcessorUse


def compile_time(say: Say) -> Iterator[tuple[Row, Bar | None]]:
    """The time from an eager model to a compiled step: medians of rounds in which both compilers alternate."""
    timings: dict[str, list[Timing]] = {name: [] for name in COMPILERS}
    for name in alternate(list(COMPILERS), REPEATS):
        compiler = COMPILERS[name]
        say(f"compiling the example GPT by {name}, round {len(timings[name]) + 1} of {REPEATS}")
        timings[name].append(least_disturbed(partial(_cold, compiler), TRIES))
    yield from compile_rows(timings)


def compile_rows(timings: Mapping[str, list[Timing]]) -> Iterator[tuple[Row, Bar | None]]:
    """The medians; the last row comes with the bar of the median ratio per round."""
    ours, theirs = COMPILERS
    ratio, disturbed = median_ratio(timings, ours, theirs), all_disturbed(*timings.values())
    bar = at_most("compile time on 4 ranks / Inductor's in one process", ratio, GOAL, disturbed=disturbed)
    for name, found in timings.items():
        compiler = COMPILERS[name]
        row: Row = {
            "compiler": name,
            "pipe": compiler.pipe,
            "x": compiler.x,
            "ranks": compiler.ranks,
            "compile_s": median_ms(found) / 1e3,
            **disturbance(found),
        }
        yield row, bar if name == theirs else None


def _cold(compiler: Compiler) -> Timing:
    """One compile with a cache of its own."""
    with TemporaryDirectory() as folder:
        environment = {"TORCHINDUCTOR_CACHE_DIR": folder}
        found = run_ranks(compiler.ranks, compiler.work, environment=environment, timeout_s=900)
    return Timing(max(rank.seconds for rank in found), share_of_others([rank.used for rank in found]))


def compile_on_mesh() -> Compiled:
    """Compile with fxpar on this rank, one of 4; runs in a process of its own."""
    mesh = fxpar.init_mesh(pipe=COMPILERS["fxpar"].pipe, x=COMPILERS["fxpar"].x)
    model, batch = _model_and_batch()
    hints = example("train_gpt").HINTS

    def prepare() -> Callable[..., Tensor]:
        fxpar.distribute(model, mesh, layouts=hints, microbatches=MICROBATCHES, example_inputs=batch)
        step: Callable[..., Tensor] = torch.compile(model, backend="fxpar")
        return step

    return _until_ready(prepare, batch)


def compile_alone() -> Compiled:
    """Compile with Inductor for the rows of one microbatch; runs in a process of its own."""
    model, batch = _model_and_batch()
    microbatch = [tensor[: BATCH // MICROBATCHES] for tensor in batch]
    return _until_ready(lambda: torch.compile(model, backend="inductor"), microbatch)


COMPILERS: Mapping[str, Compiler] = {
    "fxpar": Compiler(4, compile_on_mesh, pipe=2, x=2),
    "inductor": Compiler(1, compile_alone),
}


def _until_ready(prepare: Callable[[], Callable[..., Tensor]], batch: Any) -> Compiled:
    before, start = ProcessorUse.now(with_children=True), time.perf_counter()
    step = prepare()
    step(*batch).backward()
    ready = time.perf_counter()
    used = ProcessorUse.now(with_children=True).since(before)
    step(*batch).backward()
    return Compiled((ready - start) - (time.perf_counter() - ready), used)


def _model_and_batch() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)  # all ranks compile the same model
    gpt = example("gpt")
    config = gpt.Config()
    tokens = torch.randint(config.vocabulary, (BATCH, config.context + 1))
    return gpt.GPT(config), [tokens[:, :-1], tokens[:, 1:]]
