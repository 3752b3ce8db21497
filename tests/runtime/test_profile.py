"""A step goes by what its graphs took, and ranks that measured different times run the same schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import fxpar
from fxpar.schedule import DELAYED, Costs, build_schedule
from fxpar.world.launch import run_ranks
from tests.support.parity import BATCH, SUBJECTS, Run, check_runs, loss_of

MICROBATCHES = 4


def profile(sizes: Mapping[str, int], folder: Path) -> None:
    """A step by a schedule that goes by times, one with whole backwards, and an evaluation beside it."""
    mesh = fxpar.init_mesh(**sizes)
    subject = SUBJECTS["gpt"]
    torch.manual_seed(0)
    model, batch = subject.build(mesh.pipe), subject.make_batch(BATCH)
    stages = subject.boundaries(mesh.pipe)
    fxpar.distribute(model, mesh, stages=stages, microbatches=MICROBATCHES, example_inputs=batch)
    losses = []
    for schedule in (DELAYED, "1f1b"):
        options = {"lowering": "aten", "schedule": schedule, "profile": True, "dump": folder / schedule}
        step = torch.compile(model, backend="fxpar", options=options)
        losses.append(loss_of(step(**batch)).item())
    with torch.no_grad():
        options |= {"schedule": DELAYED}
        losses.append(loss_of(torch.compile(model, backend="fxpar", options=options)(**batch)).item())
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-6)


def test_ranks_agree_on_what_they_measured_and_on_the_delays_that_follow(tmp_path: Path) -> None:
    run_ranks(2, profile, {"pipe": 2}, tmp_path)
    for schedule, kinds in (("1f1b", "FB"), (DELAYED, "FIW")):
        ranks = [Costs.load(file) for file in sorted((tmp_path / schedule).glob("rank*/*_costs.json"))]
        assert len(ranks) == 2
        assert ranks[0].compute_us == ranks[1].compute_us
        for times in ranks[0].compute_us.values():
            assert set(times) == set(kinds), "what the training runs, and no estimates"
            assert all(time_us > 0 for time_us in times.values())
    texts = {file.read_text(encoding="utf-8").strip() for file in (tmp_path / DELAYED).glob("rank*/*_schedule.txt")}
    delays = Costs.load(tmp_path / DELAYED).weight_delays(MICROBATCHES)
    assert texts == {str(build_schedule(DELAYED, 2, MICROBATCHES, delays=delays))}


def test_profiled_training_equals_one_process() -> None:
    run = Run("gpt", {"pipe": 2}, MICROBATCHES, schedules=(DELAYED,), steps=1, profile=True)
    run_ranks(2, check_runs, [run])
