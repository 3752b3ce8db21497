"""Results beside the loss are those of the whole batch, however they depend on its samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.parity import batch_shard

CLASSES, LENGTH = 4, 3
OF_SAMPLES = ("by time", "state", "by time, flat", "by sample", "by sample, flat", "of sizes")


class Reader(nn.Module):
    """Classes of the tokens of sequences, and what scripts report of them.

    In a microbatch of one sample no rule tells the batch of a recurrent state from its layers.
    """

    def __init__(self, *, is_recurrent: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.recurrent = nn.GRU(8, 8) if is_recurrent else None

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.first(x).transpose(0, 1)
        outputs, state = (outputs.sin(), outputs[None, 0]) if self.recurrent is None else self.recurrent(outputs)
        logits = self.last(outputs)
        hits = logits.argmax(-1).t() == labels
        flat = logits.flatten(0, 1)
        return {
            "loss": functional.cross_entropy(logits.permute(1, 2, 0), labels),
            "number right": hits.sum(),
            "as a float": 2 * hits.float().sum(),
            "share right": hits.float().mean(),
            "of those that count": hits[:, 1:].sum() / (labels[:, 1:] != 1).sum(),
            "right by position": hits.sum(0),
            "classes": functional.one_hot(labels, CLASSES).sum((0, 1)),
            "confidence": flat.softmax(-1).mean(0),
            "largest": logits.amax((0, 1)),
            "by time": logits,
            "state": state,
            "by time, flat": flat,
            "by sample": logits.transpose(0, 1),
            "by sample, flat": logits.transpose(0, 1).flatten(0, 1),
            "a weight": self.last.weight * 1,
            "of sizes": x.new_ones(len(x)),
            "loss once more": functional.cross_entropy(logits.permute(1, 2, 0), labels) + 1,
        }


def check_results(sizes: Mapping[str, int], microbatches: int, rows: int) -> None:
    """Compare those of a step and of an evaluation with those of one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone, num_rows = Reader(is_recurrent=rows > microbatches), rows * fxpar.num_batch_shards(mesh)
    whole = {"x": torch.randn(num_rows, LENGTH, 6), "labels": torch.randint(0, CLASSES, (num_rows, LENGTH))}
    model, part = copy.deepcopy(alone), batch_shard(whole, mesh)
    stages = ["last"][: mesh.pipe - 1]
    fxpar.distribute(model, mesh, stages=stages, microbatches=microbatches, example_inputs=part)
    expected, of_part = alone(**whole), alone(**part)
    of_shard = expected | {name: result for name, result in of_part.items() if name in OF_SAMPLES}
    for with_grad, option in ((True, "all"), (False, "all"), (True, "local")):
        step = torch.compile(model, backend="fxpar", options={"lowering": "aten", "results": option})
        with torch.set_grad_enabled(with_grad):
            results = step(**part)
        for name, result in results.items():
            found = result.full_tensor() if isinstance(result, DTensor) else result
            wanted = (of_shard if option == "local" else expected)[name].detach()
            assert isinstance(result, DTensor) == (option == "all" and name != "loss")
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6), f"{name}: {found}, not {wanted}"


@pytest.mark.parametrize(
    ("sizes", "microbatches", "rows"),
    [({"pipe": 2}, 2, 8), ({"pipe": 2}, 4, 4), ({"z": 2}, 1, 4), ({"data": 2, "z": 2}, 2, 4), ({"x": 2}, 2, 4)],
    ids=str,
)
def test_results_are_those_of_the_whole_batch(sizes: dict[str, int], microbatches: int, rows: int) -> None:
    """With microbatches of `CLASSES` samples, of one, and of others."""
    run_ranks(math.prod(sizes.values()), check_results, sizes, microbatches, rows)


class Counter(nn.Module):
    """Returns the number of rows whose class is right, as a float, and nothing that requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.last(self.first(x)).argmax(-1) == labels).float().sum()


def check_number(sizes: Mapping[str, int]) -> None:
    """Compare the number that an evaluation returns, and nothing else, with that of one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    model, num_rows = Counter(), 8 * fxpar.num_batch_shards(mesh)
    whole = {"x": torch.randn(num_rows, 6), "labels": torch.randint(0, CLASSES, (num_rows,))}
    expected, part = model(**whole), batch_shard(whole, mesh)
    fxpar.distribute(model, mesh, stages=["last"][: mesh.pipe - 1], microbatches=2, example_inputs=part)
    with torch.no_grad():
        found = torch.compile(model, backend="fxpar", options={"lowering": "aten"})(**part)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_a_number_of_the_whole_batch_is_no_mean(sizes: dict[str, int]) -> None:
    run_ranks(2, check_number, sizes)
