"""Schedules of real models on emulated hosts, compared with each other, with signals, and with torch's pipelines."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from fxpar.bench.hosts.emulated_cluster import EmulatedCluster
from fxpar.bench.measure.allocator import keep_freed_memory
from fxpar.bench.measure.claims import hold
from fxpar.bench.measure.interleaved import (
    TRIES,
    Sample,
    Step,
    Timing,
    disturbance,
    median_ms,
    median_ratio,
    time_interleaved,
    timings_of_ranks,
)
from fxpar.bench.pipeline.cases import DELAYING, GPT, ONE_F_ONE_B, UNET, UNET_ON_PAIRS, PipelineCase
from fxpar.bench.pipeline.torch_pipeline import torch_steps
from fxpar.bench.report import Bar, Row, Say
from fxpar.schedule import DELAYED, Costs
from fxpar.world.launch import run_ranks

WARM_UP, REPEATS = 1, 5
"""The first step compiles. The median of five rounds tolerates two bad ones."""

_PAYLOAD = 0.956
"""The share of a link's rate that TCP leaves to the payload."""


def computing_here(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """The U-Net and the GPT on ranks that share this machine's memory: there is little to hide, and no goal."""
    for case in (UNET, GPT):
        say(f"{case.name} on this machine")
        for row, _ in computing_rows(case, math.inf, measure(case, None)):
            yield row, []


def computing(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """The U-Net and the GPT, by fxpar and by torch."""
    for case in (UNET, UNET_ON_PAIRS, GPT):
        say(f"{case.name}: how long stages compute")
        rate_mbit = rate_that_exposes(case)
        say(f"{case.name} on emulated hosts")
        timings = measure(case, rate_mbit)
        yield from computing_rows(case, rate_mbit, timings)


def rate_that_exposes(case: PipelineCase) -> float:
    """The rate of links, in Mbit/s, at which the case's share of a 1F1B step is communication.

    A microbatch takes P + C (S - 1) / S, with P of computation in the slowest stage and C of communication there and
    back between two stages, on average. All ranks compute at once while that is measured, as they do in a step.
    """
    num_stages = case.pipe
    with TemporaryDirectory() as folder:
        run_ranks(case.num_ranks, dump_costs, case, folder, timeout_s=600)
        costs = Costs.load(folder)
    compute_us = max(costs.action_us(stage, "F") + costs.action_us(stage, "B") for stage in range(num_stages))
    exchanged = [sum((*memory.read.values(), *memory.returned.values())) for memory in costs.memory.values()]
    both_ways_us = compute_us * case.exposed / (1 - case.exposed) * num_stages / (num_stages - 1)
    return 8 * sum(exchanged) / (num_stages - 1) / both_ways_us / _PAYLOAD


def dump_costs(case: PipelineCase, folder: str) -> None:
    """Run a step of the case on this rank, and dump the measured costs of its stages."""
    keep_freed_memory()
    model, batch = case.build()
    compiled = case.distribute(model, batch)({"schedule": "1f1b", "profile": True, "dump": folder})
    compiled(**batch).backward()


def measure(case: PipelineCase, rate_mbit: float | None) -> dict[str, list[Timing]]:
    """Time all variants, each stage on a host of its own whose link has that rate; without a rate on this machine.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    if rate_mbit is None:
        return timings_of_ranks(run_ranks(case.num_ranks, run_variants, case, timeout_s=900))
    with EmulatedCluster(case.pipe, rate_mbit=rate_mbit) as cluster:
        return timings_of_ranks(cluster.run(case.x, run_variants, case, timeout_s=900))


def run_variants(
    case: PipelineCase, warm_up: int = WARM_UP, repeats: int = REPEATS, tries: int = TRIES
) -> Mapping[str, Sequence[Sample]]:
    """Time all variants of the case, and torch's schedules if it has them. Every rank calls it."""
    keep_freed_memory()
    model, batch = case.build()
    steps: dict[str, Step] = {}
    if case.against_torch:
        theirs = torch_steps(copy.deepcopy(model), batch, case.boundaries, case.microbatches, compiled=False)
        steps |= {f"torch, {name}": step for name, step in theirs.items()}
    compile_with = case.distribute(model, batch)
    order = DELAYED
    for variant in case.variants:
        options: dict[str, Any] = {"schedule": variant.schedule, "strategy": variant.strategy}
        if variant == DELAYING:
            steps[str(variant)], order = _delayed_step(compile_with, options, model, batch)
            continue
        if variant.schedule == DELAYED:
            options["schedule"] = order  # with the costs of signals, nothing would be delayed: not the same schedule
        steps[str(variant)] = partial(_step, compile_with(options), model, batch)
    return time_interleaved(steps, warm_up, repeats, tries)


def _delayed_step(
    compile_with: Callable[[Mapping[str, Any]], Callable[..., Tensor]],
    options: Mapping[str, Any],
    model: nn.Module,
    batch: Mapping[str, Tensor],
) -> tuple[Step, str]:
    """A step that delays weight gradients according to profiled costs, and its schedule."""
    with TemporaryDirectory() as folder:
        step = partial(_step, compile_with({**options, "profile": True, "dump": folder}), model, batch)
        step()
        (written,) = Path(folder).glob("rank*/*_schedule.txt")
        return step, written.read_text(encoding="utf-8")


def _step(compiled: Callable[..., Tensor], model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    model.zero_grad()
    compiled(**batch).backward()


def computing_rows(
    case: PipelineCase, rate_mbit: float, timings: Mapping[str, Sequence[Timing]]
) -> Iterator[tuple[Row, list[Bar]]]:
    """Every variant's figures, then the claims of the case and their bars."""
    for name, found in timings.items():
        row: Row = {
            "computing stages": case.name,
            "rate_mbit": rate_mbit,
            "variant": name,
            "step_ms": median_ms(found),
            "speed_up_over_1f1b": median_ratio(timings, str(ONE_F_ONE_B), name),
            **disturbance(found),
        }
        yield row, []
    yield hold("computing stages", case.name, case.claims, timings)
