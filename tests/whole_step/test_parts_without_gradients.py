"""Layers that run with gradients after they ran without have the gradients of one process."""

from __future__ import annotations

import pytest

from fxpar.world.launch import run_ranks
from tests.support.parity import Run, check_runs


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"x": 2}, {"z": 2}], ids=str)
def test_layers_that_run_several_times_train_by_the_last(mesh: dict[str, int]) -> None:
    run_ranks(2, check_runs, [Run("cycles", mesh, 2, schedules=("1f1b",), hinted=False)])
