"""Stages with nothing to train, or with adapters alone, train like the others under every schedule."""

from __future__ import annotations

import pytest
import torch

import fxpar
from fxpar.errors import UnavailableTensorError
from fxpar.schedule import SCHEDULE_NAMES
from fxpar.world.launch import run_ranks
from tests.support.frozen_chain import class_batch
from tests.support.parity import FROZEN, SUBJECTS, Run, check_runs


def test_frozen_stages_and_adapters_train_under_every_schedule() -> None:
    """With adapters in the middle, of three stages one has no gradient, and one those of edges alone."""
    whole_and_split = ("interleaved", "zb-h1")
    runs = [
        Run(subject, {"pipe": 3}, 4, schedules=SCHEDULE_NAMES if subject == "adapters" else whole_and_split, steps=1)
        for subject in FROZEN
    ]
    run_ranks(3, check_runs, runs)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"data": 2}, {"z": 2}], ids=str)
def test_adapters_train_beside_frozen_weights_in_pieces(mesh: dict[str, int]) -> None:
    run_ranks(2, check_runs, [Run("adapters", mesh, 2, schedules=("1f1b",))])


def read_what_is_kept() -> str:
    """Evaluate, then read what the forward keeps on an object: returns the error, from whichever stage."""
    mesh = fxpar.init_mesh(pipe=2)
    torch.manual_seed(0)
    subject, batch = SUBJECTS["frozen prefix"], class_batch(4)
    model = fxpar.distribute(subject.build(2), mesh, stages=["layers.1"], microbatches=2, example_inputs=batch)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten", "profile": True})
    kept = step(**batch)["kept"].values
    assert len(kept) == 3
    with pytest.raises(UnavailableTensorError) as caught:
        kept[0] + 1
    return str(caught.value)


def test_what_a_forward_keeps_on_its_own_objects_says_so_when_it_is_read() -> None:
    for message in run_ranks(2, read_what_is_kept):
        assert "frozen_chain.py" in message and "in forward" in message
