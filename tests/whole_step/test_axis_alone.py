"""Five steps of models of several layers, with dropout, a frozen layer and batch norms, along one axis or two."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from fxpar.world.launch import run_ranks
from tests.support.axis_alone import STEPS, Trained, train_all
from tests.support.parity import Run

MESHES = [{"pipe": 2}, {"x": 2}, {"data": 2}, {"data": 2, "x": 2}]


def trained_on(mesh: dict[str, int], subject: str) -> list[Trained]:
    run = Run(subject, mesh, 2, schedules=("eager-1f1b",), steps=STEPS)
    return run_ranks(math.prod(mesh.values()), train_all, run)


@functools.cache
def on_one_rank() -> Trained:
    (found,) = trained_on({}, "gpt of two layers")
    return found


@pytest.mark.parametrize("number", range(len(MESHES)), ids=map(str, MESHES))
def test_five_steps_equal_those_of_one_process(number: int) -> None:
    expected = on_one_rank()
    subject = ("llama of two layers", "gpt of two layers")[number % 2]
    assert not any("h.0." in name for name in expected.gradients), "it is frozen"
    names = set[str]()
    for found in trained_on(MESHES[number], subject):
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
        for name, gradient in found.gradients.items():
            whole = expected.gradients[name]
            least = 1e-3 * max(each.abs().max() for each in expected.gradients.values())  # as in tests.support.parity
            error = (gradient - whole).abs().max() / whole.abs().max().clamp(min=least)
            assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
        names |= found.gradients.keys()
    assert names == expected.gradients.keys(), "some rank has each gradient"
