"""What ranks do to try the pipeline benchmark; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.bench.measure.interleaved import Sample
from fxpar.bench.pipeline.cases import GPT, PipelineCase
from fxpar.bench.pipeline.computing import run_variants
from fxpar.bench.pipeline.sleeping_step import Sleeping
from fxpar.hardware.network import LOOPBACK
from fxpar.runtime.recorder import Recorder
from fxpar.schedule import Schedule

SMALL_GPT = replace(
    GPT,
    config={"vocabulary": 32, "context": 8, "layers": 2, "hidden": 16, "heads": 2},
    microbatches=2,
    boundaries=("blocks.1",),
    pipe=2,
)


def sleep_through(model: Sleeping, schedules: Sequence[Schedule], strategy: str) -> list[list[str]]:
    """The actions that this rank slept for, in order, by each schedule."""
    return [_sleep_through(model, schedule, strategy) for schedule in schedules]


def _sleep_through(model: Sleeping, schedule: Schedule, strategy: str) -> list[str]:
    recorder = Recorder(0)
    model.executor(schedule, LOOPBACK, strategy)(recorder.observe)
    return [span.name for span in recorder.timeline.spans if span.lane == "compute"]


def run_small(case: PipelineCase) -> tuple[Mapping[str, Sequence[Sample]], dict[tuple[str, str], str]]:
    """All variants of a case, once; and the schedule that each was compiled with, by its strategy and what that was."""
    compile_model, compiled = torch.compile, {}

    def compile_and_note(model: nn.Module, **how: Any) -> Any:
        if how["backend"] == "fxpar":
            schedule = how["options"]["schedule"]
            compiled[how["options"]["strategy"], "actions" if " " in schedule else schedule] = schedule
        return compile_model(model, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_and_note)
        return run_variants(case, warm_up=0, repeats=1, tries=1), compiled
