"""Training with every fused op that there can be equals training on one process."""

from __future__ import annotations

import math

import pytest

from fxpar.world.launch import run_ranks
from tests.support.parity import Run, check_runs

FUSED = {
    "of pieces that are uneven": Run("gpt, uneven sequence", {"x": 2}, 1, schedules=("1f1b",), steps=1, fuse="always"),
    "with input gradients apart from weights'": Run(
        "llama, sequence", {"pipe": 2, "x": 2}, 4, schedules=("zb-h1",), steps=1, fuse="always"
    ),
    "of weights in shards, and all-reduces": Run(
        "gpt",
        {"z": 2, "x": 2},
        2,
        schedules=("1f1b",),
        steps=1,
        gather_weights="microbatch",
        reduce_gradients="microbatch",
        fuse="always",
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_training_with_fused_ops_equals_one_process(case: str) -> None:
    run_ranks(math.prod(FUSED[case].mesh.values()), check_runs, [FUSED[case]])
