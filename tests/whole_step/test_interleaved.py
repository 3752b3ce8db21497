"""Several stages per rank: training equals that on one process, whatever crosses between stages of one rank."""

from __future__ import annotations

import math

import pytest

from fxpar.world.launch import run_ranks
from tests.support.parity import Run, check_runs

# Stages 0 and 2 are on one rank, 1 and 3 on the other: the U-Net's skip connections stay on a rank or lead elsewhere,
# and GPT's tied weight, which the first stage sends to the last, leaves its rank.
RUNS = {
    "gpt": Run("gpt", {"pipe": 2}, 4, schedules=("interleaved",), stages=4),
    "llama": Run("llama", {"pipe": 2, "x": 2}, 4, schedules=("interleaved",), stages=4),
    "unet": Run("unet", {"pipe": 2}, 4, schedules=("interleaved",), stages=4),
    "all stages on one rank": Run("gpt", {}, 2, schedules=("interleaved",), stages=4, steps=1),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_training_with_several_stages_per_rank_equals_one_process(run: Run) -> None:
    run_ranks(math.prod(run.mesh.values()), check_runs, [run])


# One stage runs its backward now in two parts, now whole.
FOLDED = """\
0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1
1F0 2F0 2I0 1B0 2W0 1F1 2F1 2B1 1B1"""


def test_training_by_a_schedule_of_ones_own_equals_one_process() -> None:
    """Stages 1 and 2 follow each other on one rank, 0 and 3 lie on the other."""
    runs = [Run(subject, {"pipe": 2}, 2, schedules=(FOLDED,), stages=4, steps=1) for subject in ("gpt", "unet")]
    run_ranks(2, check_runs, runs)
