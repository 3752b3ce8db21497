"""The backend in one process: recompiles, evaluation, results, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import (
    GraphBreakError,
    InvalidOptionError,
    InvalidScheduleError,
    MicrobatchError,
    NoLossError,
    UnknownAlgorithmError,
    UnknownLoweringError,
    UnknownOptionError,
    UnknownScheduleError,
    UnknownStrategyError,
)


@pytest.fixture
def mesh() -> Iterator[fxpar.Mesh]:
    """A mesh of this process alone, without any launcher."""
    yield fxpar.init_mesh()
    dist.destroy_process_group()


class Net(nn.Module):
    """Returns the loss and the predictions; with `trouble`, does what fxpar cannot trace."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.trouble = trouble

    def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Any:
        h = self.norm(self.first(x)).relu()
        if self.trouble == "graph break":
            torch._dynamo.graph_break()
        predicted = self.second(h) * scale
        if self.trouble == "no loss":
            return predicted
        return {"loss": ((predicted - target) ** 2).mean(), "predicted": predicted, "rows": x.shape[0]}


ATEN = {"lowering": "aten"}


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randn(rows, 3)


def distributed(mesh: fxpar.Mesh, microbatches: int = 1, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxpar.distribute(Net(**kwargs), mesh, microbatches=microbatches)


def alone() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def test_many_steps_compile_once_and_a_new_shape_compiles_once_more(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    torch._dynamo.utils.counters.clear()
    compiled = []
    for rows in (4, 4, 6, 6, 4):
        inputs = batch(rows)
        torch.testing.assert_close(step(*inputs)["loss"], reference(*inputs)["loss"])
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled == [1, 1, 2, 2, 2]


def test_gradients_buffers_and_other_results_are_those_of_the_model(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    inputs = batch(4)
    found, expected = step(*inputs, scale=0.5), reference(*inputs, scale=0.5)
    found["loss"].backward()
    expected["loss"].backward()
    assert isinstance(found["predicted"], DTensor)
    torch.testing.assert_close(found["predicted"].full_tensor(), expected["predicted"].detach())
    assert found["rows"] == expected["rows"]
    for (name, mine), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, msg=lambda text, n=name: f"{n}: {text}")
    for (name, mine), (_, other) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, n=name: f"{n}: {text}")


def test_buffers_are_updated_in_the_order_of_microbatches(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh, microbatches=2), alone()
    x, target = batch(8)
    torch.compile(model, backend="fxpar", options=ATEN)(x, target)
    for part, goal in zip(x.chunk(2), target.chunk(2), strict=True):
        reference(part, goal)
    torch.testing.assert_close(model.norm.running_mean, reference.norm.running_mean)
    assert model.norm.num_batches_tracked == 2


def test_evaluation_without_grad_runs_forward_alone(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh, microbatches=2), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    model.eval()
    reference.eval()
    inputs = batch(4)
    with torch.no_grad():
        found, expected = step(*inputs), reference(*inputs)
    assert not found["loss"].requires_grad
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(found["predicted"].full_tensor(), expected["predicted"])


def test_a_model_without_loss_evaluates_but_does_not_train(mesh: fxpar.Mesh) -> None:
    model = distributed(mesh, trouble="no loss")
    step = torch.compile(model, backend="fxpar", options=ATEN)
    with torch.no_grad():
        assert step(*batch(4)).shape == (4, 3)
    with pytest.raises(NoLossError, match=r"scalar loss.*it returned .*\(4, 3\)"):
        step(*batch(4))


def test_gradients_accumulate_over_steps_and_scale_with_the_loss(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for factor in (1.0, 3.0):
        inputs = batch(4)
        (step(*inputs)["loss"] * factor).backward()
        (reference(*inputs)["loss"] * factor).backward()
    torch.testing.assert_close(model.second.weight.grad.full_tensor(), reference.second.weight.grad)


def test_a_second_backward_through_one_loss_is_an_error(mesh: fxpar.Mesh) -> None:
    loss = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)(*batch(4))["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed over once"):
        loss.backward()


def test_a_frozen_parameter_gets_no_gradient(mesh: fxpar.Mesh) -> None:
    model = Net()
    model.first.weight.requires_grad_(False)
    fxpar.distribute(model, mesh)
    torch.compile(model, backend="fxpar", options=ATEN)(*batch(4))["loss"].backward()
    assert model.first.weight.grad is None
    assert model.first.bias.grad is not None


def test_a_graph_break_is_an_error_with_its_reason_and_line(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh, trouble="graph break"), backend="fxpar", options=ATEN)
    with pytest.raises(GraphBreakError, match=r"graph_break.*User-inserted.*\n.*test_backend.py:\d+ in forward"):
        step(*batch(4))


def test_a_batch_that_microbatches_do_not_divide_is_an_error(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh, microbatches=4), backend="fxpar", options=ATEN)
    with pytest.raises(MicrobatchError, match=r"batch of 6, which 4 microbatches do not divide.*multiple of 4"):
        step(*batch(6))


def test_a_schedule_of_forwards_evaluates_but_does_not_train(mesh: fxpar.Mesh) -> None:
    options = {**ATEN, "schedule": [["0F0", "0F1"]]}
    step = torch.compile(distributed(mesh, microbatches=2), backend="fxpar", options=options)
    with torch.no_grad():
        assert torch.isfinite(step(*batch(4))["loss"])
    with pytest.raises(InvalidScheduleError, match="rank 0: 0B0 is missing"):
        step(*batch(4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dumps": "x"}, UnknownOptionError, "unknown option 'dumps'.*did you mean 'dump'"),
        ({"dump": 3}, InvalidOptionError, "'dump' is 3: expected a directory"),
        ({"lowering": "atn"}, UnknownLoweringError, "unknown lowering 'atn'.*did you mean 'aten'"),
        ({"schedule": "zigzag"}, UnknownScheduleError, "unknown schedule 'zigzag'"),
        ({"strategy": "broadkast"}, UnknownStrategyError, "unknown resharding strategy 'broadkast'.*'broadcast'"),
        ({"algorithm": "gredy"}, UnknownAlgorithmError, "unknown algorithm 'gredy'.*did you mean 'greedy'"),
        ({"transfer_timeout_s": 0}, InvalidOptionError, "'transfer_timeout_s' is 0: expected seconds, more than none"),
    ],
)
def test_bad_options_are_refused(
    mesh: fxpar.Mesh, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=options)
    with pytest.raises(error, match=message):
        step(*batch(4))


def test_a_model_that_is_not_distributed_compiles_for_one_device() -> None:
    model = alone()
    inputs = batch(4)
    expected = copy.deepcopy(model)(*inputs)["loss"]
    torch.testing.assert_close(torch.compile(model, backend="fxpar", options=ATEN)(*inputs)["loss"], expected)


def test_dumps_are_numbered_in_the_order_of_the_passes(mesh: fxpar.Mesh, tmp_path: Path) -> None:
    torch.compile(distributed(mesh), backend="fxpar", options={**ATEN, "dump": tmp_path})(*batch(4))
    names = sorted(path.name.partition(".")[0].partition("_")[2] for path in (tmp_path / "rank0").iterdir())
    passes = [
        "capture",
        "split_stages",
        "trace_joint",
        "logical_random",
        "decompose_for_sharding",
        "propagate_layouts",
        "insert_reshards",
        "insert_collectives",
        "partition_forward",
        "partition_backward",
        "overlap_collectives_forward",
        "overlap_collectives_backward",
        "schedule",
        "program",
        "memory",
        "costs",
    ]
    assert names == sorted(passes)
    numbered = sorted((tmp_path / "rank0").iterdir())
    assert [path.name.partition(".")[0].partition("_")[2] for path in numbered] == passes
    assert "first" in (tmp_path / "rank0" / "01_capture.py").read_text()
