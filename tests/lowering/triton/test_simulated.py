"""What hosts tell GPUs to do for fused ops, under any timing: no deadlock, and nothing read too early or too late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

RANKS = "tests.lowering.triton.fused_on_simulated"


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 1)])
def test_calls_one_after_another_give_what_they_are_by_definition(ranks: int, seed: int, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*launcher, "-m", RANKS, str(tmp_path), str(seed), "12"],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # to be chosen before Triton is imported
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
