"""What watches a step: profilers, traces of all ranks on one clock, and the figures of `step_stats`."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import fxpar
from fxpar.errors import NoRecordedStepError, PlanMismatchError
from fxpar.schedule.timeline import COLLECTIVES, COMPUTE, SENDS, WAIT, Span, Timeline
from fxpar.world.launch import run_ranks

BATCH, LENGTH, WIDTH, VOCABULARY, MICROBATCHES = 8, 16, 64, 128, 4
AHEAD_S = 5.0
"""How far the clock of the second host is ahead."""


class Model(nn.Module):
    """An MLP on embedded tokens, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(self.embedding(tokens))).square().mean()


@dataclass(frozen=True, slots=True)
class Watched:
    """What a rank saw: names of ranges with their counts, and figures of a step by itself and with a timeline."""

    ranges: Mapping[str, int]
    stats: Mapping[str, float]
    stats_of_evaluation: Mapping[str, float]
    loss: float
    plain_loss: float


def on_its_own_host(rank: int) -> None:
    """Ranks 2 and 3 are on another host, whose clock is ahead."""
    os.environ["FXPAR_HOST"] = f"host {rank // 2}"
    if rank // 2:
        real = time.time
        time.time = lambda: real() + AHEAD_S


def watch_steps(folder: Path) -> Watched:
    """Train on pipe=2 × x=2, watched in several ways."""
    torch.manual_seed(0)
    model, mesh = Model(), fxpar.init_mesh(pipe=2, x=2)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    hints = {"*.0.weight": ("x", None), "*.2.weight": (None, "x")}
    fxpar.distribute(model, mesh, stages=["second"], layouts=hints, microbatches=MICROBATCHES, example_inputs=(tokens,))
    options = {"lowering": "aten", "timeline": folder}
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    with pytest.raises(NoRecordedStepError, match=r"no step of Model was recorded"):
        fxpar.step_stats(model)
    plain = step(tokens)
    with profile() as profiled:
        step(tokens).backward()
    with fxpar.record_steps(step):
        step(tokens).backward()
    stats = fxpar.step_stats(step)
    with torch.no_grad(), fxpar.record_steps(model):
        step(tokens)
    of_evaluation = fxpar.step_stats(model)
    traced = torch.compile(model, backend="fxpar", options=options)
    loss = traced(tokens)
    loss.backward()
    with pytest.raises(
        PlanMismatchError, match=r"the option timeline \(ranks 1, 2, 3; rank 0 has 'True', rank 1 has 'False'"
    ):
        own = {"timeline": folder} if mesh.rank == 0 else {}
        torch.compile(model, backend="fxpar", options={"lowering": "aten", "check_inputs": False, **own})(tokens)
    ranges = Counter(event.name for event in profiled.events())
    return Watched(ranges, stats, of_evaluation, loss.item(), plain.item())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def watched(folder: Path) -> list[Watched]:
    return run_ranks(4, watch_steps, folder, enter=on_its_own_host)


def test_watching_changes_no_bit(watched: list[Watched]) -> None:
    assert all(each.loss == each.plain_loss for each in watched)


def test_profilers_see_actions_transfers_and_collectives_with_their_axes(watched: list[Watched]) -> None:
    for rank, each in enumerate(watched):
        stage = rank // 2
        actions = {f"{stage}{kind}{microbatch}": 1 for kind in "FB" for microbatch in range(MICROBATCHES)}
        assert {name: count for name, count in each.ranges.items() if name in actions} == actions
        sent = [name for name in each.ranges if name.startswith("send ") and name.endswith(" over pipe")]
        waited = [name for name in each.ranges if name.startswith("wait ") and name.endswith(" over pipe")]
        assert len(sent) == len(waited) == MICROBATCHES
        started = {name: count for name, count in each.ranges.items() if name.endswith("over x") and "wait" not in name}
        assert started and all(count % MICROBATCHES == 0 for count in started.values())
        assert all(each.ranges[f"wait for {name}"] == count for name, count in started.items())
        assert each.ranges["wait for all_reduce of the loss"] == 1


def profile_shards() -> set[str]:
    """The names of all ranges of a step whose weights are gathered once, over z, in graphs of their own."""
    model, tokens = Model(), torch.zeros(BATCH // 2, LENGTH, dtype=torch.int64)
    fxpar.distribute(model, fxpar.init_mesh(z=2), microbatches=2)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten", "gather_weights": "step"})
    with profile() as profiled:
        step(tokens).backward()
    return {event.name for event in profiled.events()}


def test_waits_for_what_another_graph_started_have_their_axis_too() -> None:
    for names in run_ranks(2, profile_shards):
        assert {"all_gather over z", "wait for all_gather over z", "wait for reduce_scatter over z"} <= names
        assert "wait for a collective" not in names


def trace_of(folder: Path) -> tuple[Timeline, dict[str, Any]]:
    """The merged timeline, and what the file says about it."""
    return Timeline.load(folder / "trace.json"), json.loads((folder / "trace.json").read_text())["otherData"]


def test_one_trace_has_all_ranks_on_one_clock(watched: list[Watched], folder: Path) -> None:
    timeline, about = trace_of(folder)
    assert timeline.ranks == (0, 1, 2, 3)
    assert about["clock of rank 1"] == "+0.0 us to that of rank 0, give or take 0.0 us"
    offset, _, error = about["clock of rank 2"].partition(" us to that of rank 0, give or take ")
    error_us = float(error.removesuffix(" us"))
    assert about["clock of rank 3"] == about["clock of rank 2"]
    assert float(offset) == pytest.approx(-1e6 * AHEAD_S, abs=error_us) and 0 < error_us < 1e6 * AHEAD_S / 10
    lanes = spans_by_lane(timeline)
    assert lanes[WAIT]
    for wait in lanes[WAIT]:  # no value arrives before it was sent
        sent = min(span.begin_us for span in lanes[SENDS] if span.name == wait.name)
        assert wait.end_us > sent - error_us
    assert timeline.makespan_us < 1e6 * AHEAD_S


def test_timelines_of_single_stages_are_on_that_clock_too(watched: list[Watched], folder: Path) -> None:
    stages, (whole, _) = Timeline.load(folder), trace_of(folder)
    assert stages.ranks == (0, 1)
    computed = {span.begin_us for span in whole.spans if span.lane == COMPUTE}
    assert {span.begin_us for span in stages.spans if span.lane == COMPUTE} < computed


def test_collectives_are_in_a_lane_of_their_own(watched: list[Watched], folder: Path) -> None:
    found = spans_by_lane(trace_of(folder)[0])[COLLECTIVES]
    names = {span.name for span in found}
    assert {"all_reduce over x", "wait for all_reduce over x", "wait for all_reduce of the loss"} <= names
    assert {span.kind for span in found} == {"start", "wait"}


def spans_by_lane(timeline: Timeline) -> dict[str, list[Span]]:
    return {
        lane: [span for span in timeline.spans if span.lane == lane] for lane in (COMPUTE, WAIT, SENDS, COLLECTIVES)
    }


FORWARD_FLOPS = BATCH * LENGTH * 2 * (2 * WIDTH * 4 * WIDTH) * 2
"""Four products with a weight, of two operations for each multiplication."""


def test_figures_are_those_of_the_step_on_all_ranks(watched: list[Watched]) -> None:
    assert all(each.stats == watched[0].stats for each in watched)
    stats = watched[0].stats
    assert 0 < stats["step_s"] < 60
    assert stats["samples_per_s"] == pytest.approx(BATCH / stats["step_s"])
    assert stats["tokens_per_s"] == pytest.approx(BATCH * LENGTH / stats["step_s"])
    assert stats["flops_per_s"] * stats["step_s"] * 4 == pytest.approx(3 * FORWARD_FLOPS)
    assert 0 < stats["bubble_share"] < 1
    assert stats["exposed_communication_share"] == pytest.approx(stats["exposed_communication_s"] / stats["step_s"])
    assert 0 < stats["exposed_communication_share"] < 1
    assert stats["peak_memory_bytes"] > 1e8
    assert 0 < stats["mfu"] < 1


def test_an_evaluation_has_the_arithmetic_of_forwards_alone(watched: list[Watched]) -> None:
    stats = watched[0].stats_of_evaluation
    assert stats["flops_per_s"] * stats["step_s"] * 4 == pytest.approx(FORWARD_FLOPS)
