"""An Accelerator for a mesh trains as one process does, and has the batch shards of the mesh for processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import fxpar
from fxpar.errors import InvalidOptionError, NoMeshError, OptimizerStateError, PlainModelError
from fxpar.integrations.accelerate import FxparAccelerator
from fxpar.model.distribution import distribution_of_model
from fxpar.world import mesh
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN
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


def values_of_shards() -> list[Any]:
    """What ranks reduce, and their parts of what all have, on a mesh of two batch shards."""
    set_launcher_environment()
    fxpar.init_mesh(z=2, x=2)
    accelerator = FxparAccelerator(cpu=True)
    value = {"of rank": torch.tensor([1.0 + accelerator.process_index])}
    found: list[Any] = [accelerator.reduce(value, how)["of rank"].item() for how in ("sum", "mean", "max", "none")]
    for padded in (False, True):
        with accelerator.split_between_processes(["a", "b", "c"], apply_padding=padded) as own:
            found.append(own)
    return found


def test_ranks_that_share_a_shard_count_once() -> None:
    first = [3.0, 1.5, 2.0, 1.0, ["a", "b"], ["a", "b"]]
    second = [3.0, 1.5, 2.0, 2.0, ["c"], ["c", "c"]]
    assert run_ranks(4, values_of_shards) == [first, first, second, second]


def train_adversaries(sizes: dict[str, int], folder: Path) -> list[float]:
    """The losses of two models that train each other: of two epochs, and of the second one after loading the first."""
    set_launcher_environment()
    torch.manual_seed(0)
    make, judge = (torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))) for _ in range(2))
    rows = TensorDataset(*torch.randn(2, 16, 4))
    if sizes:
        mesh = fxpar.init_mesh(**sizes)
        example = torch.zeros(8 // fxpar.num_batch_shards(mesh), 4)
        for model in (make, judge):
            fxpar.distribute(model, mesh, stages=["1"][: mesh.pipe - 1], example_inputs=(example,))
    accelerator = FxparAccelerator(cpu=True, options=ATEN) if sizes else Accelerator(cpu=True)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in (make, judge)]
    loader = DataLoader(rows, batch_size=8 // accelerator.num_processes)
    make, judge, loader, *optimizers = accelerator.prepare(make, judge, loader, *optimizers)
    losses = []

    def train_epoch() -> None:
        for noise, real in loader:
            fake = make(noise)
            told_apart = softplus(-judge(real)).mean() + softplus(judge(fake.detach())).mean()
            for loss, optimizer in ((told_apart, optimizers[1]), (None, optimizers[0])):
                loss = softplus(-judge(fake)).mean() if loss is None else loss
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())

    train_epoch()
    accelerator.save_state(str(folder / "state"))
    train_epoch()
    accelerator.load_state(str(folder / "state"))
    train_epoch()
    return losses


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}], ids=str)
def test_two_models_that_train_each_other_are_saved_and_loaded(sizes: dict[str, int], tmp_path: Path) -> None:
    (expected,) = run_ranks(1, train_adversaries, {}, tmp_path / "alone")
    assert expected[4:8] == expected[8:]
    assert run_ranks(2, train_adversaries, sizes, tmp_path / "mesh") == [pytest.approx(expected, abs=1e-5)] * 2


def save_one_optimizer_of_two_models(folder: Path) -> None:
    set_launcher_environment()
    mesh = fxpar.init_mesh()
    models = [fxpar.distribute(torch.nn.Linear(2, 2), mesh) for _ in range(2)]
    accelerator = FxparAccelerator(cpu=True, options=ATEN)
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()])
    accelerator.prepare(*models, optimizer)
    with pytest.raises(OptimizerStateError, match=r"optimizer 0 has parameters of 2 models.*for each of them"):
        accelerator.save_state(str(folder))


def test_an_optimizer_of_two_models_is_not_saved(tmp_path: Path) -> None:
    run_ranks(1, save_one_optimizer_of_two_models, tmp_path)


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
