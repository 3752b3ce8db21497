"""The kernels are right in Triton's interpreter, which a process must choose before it imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent
CASES = sorted(map(str, FOLDER.glob("interpreted_*.py")))


def test_kernels_are_right_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3", *CASES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
