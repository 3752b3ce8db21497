"""What a rank does to train a model under several schedules and take notes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import fxpar
from fxpar.runtime import step as step_module
from fxpar.runtime.recorder import Recorder
from tests.support.parity import BATCH, SUBJECTS, loss_of

MICROBATCHES = 8


class _Kept(Recorder):
    """A recorder that can be asked after the step."""

    latest: Recorder

    def __init__(self, rank: int, device_type: str) -> None:
        super().__init__(rank, device_type)
        _Kept.latest = self


def record(
    subject_name: str,
    sizes: Mapping[str, int],
    num_stages: int,
    schedules: Sequence[str],
    directory: Path,
    given: Mapping[str, str],
) -> list[int]:
    """A step under each schedule, dumped to `directory / schedule` and recorded in `measured` below that.

    `given` are its other options. Returns the most that was kept for the backward under each schedule.
    """
    mesh = fxpar.init_mesh(**sizes)
    subject = SUBJECTS[subject_name]
    torch.manual_seed(0)
    model, batch = subject.build(num_stages), subject.make_batch(BATCH)
    fxpar.distribute(
        model,
        mesh,
        stages=subject.boundaries(num_stages),
        layouts=subject.hints,
        microbatches=MICROBATCHES,
        schedule=schedules[0],
        example_inputs=batch,
    )
    step_module.Recorder = _Kept  # type: ignore[misc]
    peaks = []
    for schedule in schedules:
        folder = directory / schedule
        options = {**given, "schedule": schedule, "dump": folder, "timeline": folder / "measured"}
        step = torch.compile(model, backend="fxpar", options=options)
        loss_of(step(**batch)).backward()
        peaks.append(_Kept.latest.saved_peak_bytes)
    return peaks
