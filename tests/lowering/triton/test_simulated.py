"""What hosts tell GPUs to do for fused ops, under any timing: no deadlock, and nothing read too early or too late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).parent / "simulated_fused_ops.py"


def test_fused_ops_are_right_on_simulated_gpus_and_mistakes_in_them_are_found() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3", str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # to be chosen before Triton is imported
        cwd=CASES.parents[3],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
