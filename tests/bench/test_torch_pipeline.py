"""Torch's pipelines compute what one process does, so that their times say something about fxpar's."""

from __future__ import annotations

import pytest

from fxpar.world.launch import run_ranks
from tests.bench.step_by_torch import Case, check_steps, small

CASES = [
    Case("gpt", ["blocks.2"]),
    Case("gpt", ["blocks.1", "blocks.2", "blocks.3"]),
    # Skip connections from the first stage to the last pass the one between by.
    Case("unet", ["unet.up_blocks.0", "unet.up_blocks.1"]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{len(case.boundaries) + 1}")
def test_both_schedules_give_the_loss_and_gradients_of_one_process(case: Case) -> None:
    by_rank = run_ranks(len(case.boundaries) + 1, check_steps, case, timeout_s=100)
    model, _ = small(case.model)
    on_ranks = sorted(name for names in by_rank for name in names)
    assert on_ranks == sorted(name for name, _ in model.named_parameters()), "one rank has each"
