"""An Accelerator for a mesh trains as one process does, and has the batch shards of the mesh for processes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import fxpar
from fxpar.errors import InvalidOptionError, NoMeshError, PlainModelError
from fxpar.integrations.accelerate import FxparAccelerator
from fxpar.model.distribution import distribution_of_model
from fxpar.world import mesh
from fxpar.world.launch import run_ranks
from tests.support.run_under_launcher import run_under_launcher, set_launcher_environment

ARGUMENTS = ("--lowering", "aten", "--checkpoint", "saved")


def losses(num_ranks: int, folder: Path) -> list[float]:
    """Those of the example, half of them after it loaded what it had saved."""
    folder.mkdir()
    run_ranks(num_ranks, run_under_launcher, "train_by_accelerate.py", ARGUMENTS, folder)
    return json.loads((folder / "losses.json").read_text())


def test_accelerate_on_a_mesh_trains_saves_and_loads_as_in_one_process(tmp_path: Path) -> None:
    expected = losses(1, tmp_path / "alone")
    assert len(expected) == 12
    assert losses(4, tmp_path / "mesh") == pytest.approx(expected, abs=1e-4)


def use_shards() -> tuple[list[int], list[int], list[str], int, float]:
    """The rows of this rank, tensors and objects gathered, the number of processes, the learning rate after a step."""
    set_launcher_environment()
    fxpar.init_mesh(z=2, x=2)
    accelerator = FxparAccelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
    rows = [row for (batch,) in loader for row in batch.tolist()]
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    optimizer.step()
    schedule.step()
    gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
    objects = accelerator.gather_for_metrics([f"of shard {accelerator.process_index}"])
    return rows, gathered.tolist(), objects, accelerator.num_processes, schedule.get_last_lr()[0]


def test_processes_are_the_batch_shards_of_the_mesh() -> None:
    first, second = [0, 1, 4, 5], [2, 3, 6, 7]
    objects = ["of shard 0", "of shard 1"]
    assert run_ranks(4, use_shards) == [(rows, [0, 1], objects, 2, 0.25) for rows in (first, first, second, second)]


def misuse() -> None:
    """Make accelerators before the mesh, and of a precision whose scaler they do not know."""
    mesh._latest.clear()  # the process that this rank was forked from may have made one
    with pytest.raises(NoMeshError, match=r"call fxpar.init_mesh\(...\) before"):
        FxparAccelerator(cpu=True, mixed_precision="bf16")
    fxpar.init_mesh()
    plain = Accelerator(cpu=True)
    with (
        patch.object(Accelerator, "mixed_precision", "fp16"),  # which accelerate itself refuses on CPUs
        pytest.raises(InvalidOptionError, match="option 'mixed_precision' is 'fp16': expected \"no\" or \"bf16\""),
    ):
        FxparAccelerator.adopt(plain)


def test_an_accelerator_says_what_it_needs() -> None:
    run_ranks(1, misuse)
    with pytest.raises(PlainModelError):
        distribution_of_model(torch.nn.Linear(1, 1), "FxparAccelerator")
