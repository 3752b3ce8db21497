"""Training equals that on one process on every mesh of 1, 2, 4 and 8 ranks along data, z, y and x, and twice that.

All models on all meshes take hours: `pytest -m every_mesh tests/whole_step/test_every_mesh.py`. Without the marker the
meshes of up to four ranks are met once, and of those of eight the ones that mix the most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from fxpar.costs.equations import configurations
from fxpar.ir.remat import POLICIES
from fxpar.ir.storage_options import MICROBATCH, STEP
from fxpar.world.launch import run_ranks
from tests.support.parity import Run, check_runs

SUBJECTS = ("chain", "gpt of two layers", "unet")
AXES = ("data", "z", "y", "x")
TIMES = tuple(itertools.product((STEP, MICROBATCH), repeat=2))


def meshes() -> Iterator[dict[str, int]]:
    """Every one, with two stages where there are ranks for them."""
    for num_ranks in (1, 2, 4, 8):
        for sizes in configurations(num_ranks, AXES):
            yield sizes
            yield {"pipe": 2, **sizes}


def run_of(number: int, sizes: dict[str, int], subject: str) -> Run:
    """A few steps; what is gathered, reduced and computed again when changes from mesh to mesh."""
    gather, reduce = TIMES[number % len(TIMES)]
    return Run(
        subject,
        sizes,
        microbatches=2,
        schedules=("eager-1f1b",),
        steps=5,
        hinted=False,
        gather_weights=gather,
        reduce_gradients=reduce,
        remat=POLICIES[number % len(POLICIES)],
        gathered_bytes=(0.0, math.inf)[number % 2],
    )


def named(runs: list[Run]) -> list[object]:
    return [pytest.param(run, id=f"{run.subject} on {_short(run)}") for run in runs]


def _short(run: Run) -> str:
    return " ".join(f"{axis}{size}" for axis, size in run.mesh.items() if size > 1) or "one rank"


ALL = [run_of(number, sizes, subject) for number, sizes in enumerate(meshes()) for subject in SUBJECTS]
MIXED = ({"z": 2, "y": 2, "x": 2}, {"pipe": 2, "data": 2, "z": 2})


def is_quick(run: Run) -> bool:
    """Whether it is run in any case: the model that is compiled soonest, on few ranks or on a mixture of axes."""
    several = {axis: size for axis, size in run.mesh.items() if size > 1}
    return run.subject == "chain" and (math.prod(several.values()) <= 4 or several in MIXED)


QUICK = [run for run in ALL if is_quick(run)]


def test_all_meshes_are_there() -> None:
    for num_ranks, wanted in ((1, 1), (2, 4), (4, 10), (8, 20)):
        found = {str(run.mesh) for run in ALL if "pipe" not in run.mesh and math.prod(run.mesh.values()) == num_ranks}
        assert len(found) == wanted
    assert len(QUICK) == 1 + 4 + 10 + 1 + 4 + len(MIXED)


@pytest.mark.parametrize("run", named(QUICK))
def test_a_chain_trains_as_on_one_process(run: Run) -> None:
    run_ranks(math.prod(run.mesh.values()), check_runs, [run])


@pytest.mark.every_mesh
@pytest.mark.parametrize("run", named(ALL))
def test_every_model_trains_on_every_mesh(run: Run) -> None:
    run_ranks(math.prod(run.mesh.values()), check_runs, [run])
