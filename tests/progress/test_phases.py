"""Phases are told to those who watch, and their times to the log."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest

from fxpar.progress.phases import as_phase, phase, watching


@as_phase
def some_pass(number: int) -> int:
    """A pass."""
    with phase(f"stage {number}"):
        return number + 1


def test_who_watches_is_told_of_every_begin_and_end() -> None:
    told: list[tuple[str, ...]] = []
    with watching(told.append), phase("plan"):
        assert some_pass(1) == 2
    some_pass(3)
    assert told == [
        ("plan",),
        ("plan", "some_pass"),
        ("plan", "some_pass", "stage 1"),
        ("plan", "some_pass"),
        ("plan",),
        (),
    ]


def test_a_phase_that_fails_ends() -> None:
    told: list[tuple[str, ...]] = []
    with watching(told.append), pytest.raises(ValueError, match="no"), phase("plan"):
        raise ValueError("no")
    assert told[-1] == ()


def test_the_log_has_the_time_of_every_phase_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fxpar"), phase("plan"):
        some_pass(1)
    lines = [re.sub(r"^[0-9.]+ s", "TIME", record.getMessage()) for record in caplog.records]
    assert lines == ["TIME: plan, some_pass, stage 1", "TIME: plan, some_pass", "TIME: plan"]


PROGRAM = """
import logging
import torch
from fxpar.progress.phases import phase

logging.basicConfig()
with phase("a pass"):
    pass
"""


def test_torch_logs_turns_details_on_and_nothing_is_there_twice() -> None:
    environment = os.environ | {"TORCH_LOGS": "+fxpar"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    assert done.stderr.count("s: a pass") == 1
