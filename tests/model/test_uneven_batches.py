"""Batches that the microbatches do not divide, as the last of an epoch, train and evaluate as on one process."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.model.arguments import count_microbatches
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import batch_shard, compare

mesh = pytest.fixture(mesh_of_one_process)


@pytest.mark.parametrize(
    ("rows", "wanted", "count"),
    [
        ([8], 4, 4),
        ([6], 4, 6),
        ([9], 2, 3),
        ([7], 2, 7),
        ([3], 4, 3),
        ([1], 4, 1),
        ([8, 12], 3, 4),
        ([], 4, 4),
        ([0], 2, 2),
    ],
)
def test_microbatches_are_never_larger_than_those_of_a_whole_batch(rows: list[int], wanted: int, count: int) -> None:
    leaves = [torch.zeros(2, size) for size in rows]
    assert count_microbatches([*leaves, "other"], [1] * len(rows) + [None], wanted) == count


class Net(nn.Module):
    """Returns its loss and the predictions; the layers are small, so that rows have losses of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        predicted = self.last(self.norm(self.first(x)).relu())
        return {"loss": nn.functional.mse_loss(predicted, y), "predicted": predicted}


def test_a_dump_shows_whole_batches(mesh: fxpar.Mesh, tmp_path: Path) -> None:
    model = fxpar.distribute(Net(), mesh, microbatches=2)
    step = torch.compile(model, backend="fxpar", options={**ATEN, "dump": tmp_path})
    for rows in (8, 3):
        step(torch.randn(rows, 6), torch.randn(rows, 4))["loss"].backward()
    (facts,) = tmp_path.glob("rank0/*_step_facts.json")
    assert json.loads(facts.read_text())["microbatches"] == 2


ROWS = (8, 5, 3, 1, 6)
"""Of a batch shard; two and four microbatches divide the first."""


def check_uneven_batches(sizes: Mapping[str, int], schedule: str, microbatches: int) -> None:
    """A step and an evaluation of each batch, and of one more whose shape was not trained. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone = Net()
    model, shards = copy.deepcopy(alone), fxpar.num_batch_shards(mesh)
    batches = [{"x": torch.randn(rows * shards, 6), "y": torch.randn(rows * shards, 4)} for rows in ROWS]
    stages = ["last"][: mesh.pipe - 1]
    fxpar.distribute(
        model,
        mesh,
        stages=stages,
        schedule=schedule,
        microbatches=microbatches,
        example_inputs=batch_shard(batches[0], mesh),
    )
    step = torch.compile(model, backend="fxpar", options={**ATEN, "results": "all"})
    for number, whole in enumerate(batches):
        part, where = batch_shard(whole, mesh), f"{len(whole['x'])} rows on {sizes}"
        if number < len(batches) - 1:
            expected, found = alone(**whole), step(**part)
            expected["loss"].backward()
            found["loss"].backward()
            compare(where, expected["loss"], found["loss"], alone, model)
        with torch.no_grad():
            evaluated: Any = step(**part)
            torch.testing.assert_close(evaluated["predicted"].full_tensor(), alone(**whole)["predicted"], msg=where)
            torch.testing.assert_close(evaluated["loss"], alone(**whole)["loss"], msg=where)


@pytest.mark.parametrize(
    ("sizes", "schedule", "microbatches"),
    [
        ({"pipe": 2}, "eager-1f1b", 4),
        ({"pipe": 2}, "zb-h1", 2),
        ({"z": 2}, "1f1b", 2),
        ({"x": 2}, "gpipe", 4),
        ({"pipe": 2, "data": 2}, "eager-1f1b-delayed", 2),
    ],
    ids=str,
)
def test_batches_of_any_size_equal_one_process(sizes: dict[str, int], schedule: str, microbatches: int) -> None:
    run_ranks(math.prod(sizes.values()), check_uneven_batches, sizes, schedule, microbatches)
