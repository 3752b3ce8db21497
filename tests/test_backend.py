"""The backend in one process: a step compiles once for each shape, and does what the model does."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.ir import trace_forward
from fxpar.runtime.step import Step
from tests.support.one_process import ATEN, Net, alone, batch, distributed, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


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


def test_shapes_never_exhaust_torchs_recompile_limit(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)
    limit = torch._dynamo.config.recompile_limit
    for rows in [*range(2, limit + 4), 2]:
        step(*batch(rows))


def test_steps_for_shapes_that_were_not_used_for_long_are_dropped_and_built_again(
    mesh: fxpar.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_forward, "TRACES_KEPT", 2)
    step = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)
    torch._dynamo.utils.counters.clear()
    compiled, steps = [], [_num_steps()]
    for rows in (4, 6, 4, 8, 4, 6):
        step(*batch(rows))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        steps.append(_num_steps())
    assert compiled == [1, 2, 2, 3, 3, 3], "nothing is traced twice"
    assert [found - steps[0] for found in steps] == [0, 1, 2, 2, 2, 2, 2]


def _num_steps() -> int:
    """How many steps this process keeps."""
    gc.collect()
    return sum(isinstance(found, Step) for found in gc.get_objects())


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


def test_running_statistics_are_updated_in_the_order_of_microbatches_and_their_count_once(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh, microbatches=2), alone()
    x, target = batch(8)
    torch.compile(model, backend="fxpar", options=ATEN)(x, target)
    for part, goal in zip(x.chunk(2), target.chunk(2), strict=True):
        reference(part, goal)
    torch.testing.assert_close(model.norm.running_mean, reference.norm.running_mean)
    assert model.norm.num_batches_tracked == 1


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


def test_gradients_accumulate_over_steps_and_scale_with_the_loss(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for factor in (1.0, 3.0):
        inputs = batch(4)
        (step(*inputs)["loss"] * factor).backward()
        (reference(*inputs)["loss"] * factor).backward()
    torch.testing.assert_close(model.second.weight.grad.full_tensor(), reference.second.weight.grad)


def test_a_frozen_parameter_gets_no_gradient(mesh: fxpar.Mesh) -> None:
    model = Net()
    model.first.weight.requires_grad_(False)
    fxpar.distribute(model, mesh)
    torch.compile(model, backend="fxpar", options=ATEN)(*batch(4))["loss"].backward()
    assert model.first.weight.grad is None
    assert model.first.bias.grad is not None


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
        "rank_facts",
        "step_facts",
    ]
    assert names == sorted(passes)
    numbered = sorted((tmp_path / "rank0").iterdir())
    assert [path.name.partition(".")[0].partition("_")[2] for path in numbered] == passes
    assert "first" in (tmp_path / "rank0" / "01_capture.py").read_text()
