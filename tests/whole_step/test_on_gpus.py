"""Training over NCCL on GPUs equals training on one of them, however many there are: ranks may share one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import fxpar
from fxpar.world.launch import run_ranks
from tests.passes.test_logical_random import losses_on
from tests.support.gpu_ranks import on_gpus
from tests.support.move_tensors import reshard_at_random
from tests.support.parity import Run, check_runs, check_same_bits, on_device, token_batch
from tests.support.sequences import check_sequences
from tests.support.small_models import hf_gpt2
from tests.whole_step.test_precision import check_doubles, check_that_losses_stay_together, half_precision_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ONE_RANK: dict[str, int] = {}
PIPELINE, SPLIT, SHARDED, BOTH = {"pipe": 2}, {"x": 2}, {"z": 2}, {"pipe": 2, "x": 2}
BY_INDUCTOR = [
    Run("gpt2", ONE_RANK, 2, schedules=("1f1b",)),
    Run("llama", PIPELINE, 4, schedules=("eager-1f1b", "zb-h1"), steps=1),
    Run("unet", PIPELINE, 2, schedules=("1f1b",), steps=1),
    Run("gpt2", SPLIT, 2, schedules=("1f1b",)),
    Run("gpt, sequence", SPLIT, 2, schedules=("1f1b",), fuse="always", steps=1),
    Run("gpt", SHARDED, 2, schedules=("1f1b",)),
    Run("gpt", BOTH, 4, schedules=("eager-1f1b",)),
]
BY_ATEN = [
    Run("gpt", PIPELINE, 4, steps=1),  # under every schedule
    Run("gpt", PIPELINE, 4, schedules=("interleaved",), stages=4, steps=1),
    Run("chain", BOTH, 4, schedules=("eager-1f1b", "gpipe")),
    Run("gpt", BOTH, 1, schedules=("eager-1f1b",), steps=1),
    Run("llama", BOTH, 2, schedules=("1f1b",), remat="full", steps=1),
    Run("gpt", BOTH, 2, schedules=("eager-1f1b",), profile=True, steps=1),
    Run("shared embedder", {"pipe": 2, "data": 2}, 4, schedules=("zb-h2", "1f1b")),
    Run("unet", {"pipe": 4}, 4, schedules=("eager-1f1b", "1f1b"), steps=1),
    Run("gpt2", {"z": 2, "x": 2}, 4, schedules=("1f1b",), gather_weights="microbatch"),
]
RUNS = [*BY_ATEN, *(replace(run, lowering="inductor") for run in BY_INDUCTOR)]
MESHES = list({str(run.mesh): run.mesh for run in RUNS}.values())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_equals_one_process(mesh: Mapping[str, int]) -> None:
    run_ranks(math.prod(mesh.values()), on_gpus, check_runs, [run for run in RUNS if run.mesh == mesh], timeout_s=120)


def step_without_waiting(sizes: Mapping[str, int]) -> None:
    """Once all is compiled, the host queues a step, its backward and the optimizer's: PyTorch raises if it waits."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    model = hf_gpt2(layers=2, dropout=0.1).to(mesh.device_type)
    batch = on_device(mesh.device_type, token_batch(("input_ids", "labels"), 8))
    batch["labels"][0, 5:] = -100
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=batch)
    step = torch.compile(model, backend="fxpar", options={"check_inputs": False})  # it reads them in few steps
    optimizer = torch.optim.AdamW(model.parameters())
    for mode in ("default", "default", "error", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        optimizer.zero_grad()
        step(**batch)["loss"].backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sizes", [ONE_RANK, {"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_the_host_runs_ahead_of_the_gpu(sizes: Mapping[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), on_gpus, step_without_waiting, sizes, timeout_s=120)


def test_every_schedule_gives_the_same_bits() -> None:
    run_ranks(4, on_gpus, check_same_bits, "gpt", {"pipe": 2, "x": 2}, 4, timeout_s=120)


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ({"pipe": 2}, "packed, of several lengths"),
        ({"z": 2}, "padded"),
        ({"x": 2}, "flex, odd heads"),
        ({"x": 2}, "flex, inductor"),
    ],
)
def test_sequences_train_as_on_one_process(sizes: Mapping[str, int], case: str) -> None:
    run_ranks(2, on_gpus, check_sequences, sizes, [case])


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_step_computes_gathers_crosses_and_reduces_in_its_dtypes(lowering: str) -> None:
    run_ranks(4, on_gpus, check_doubles, "gpt", {"pipe": 2, "z": 2}, lowering)


def test_training_in_half_precision_stays_with_that_of_one_process() -> None:
    losses = run_ranks(4, on_gpus, half_precision_losses, "gpt", {"pipe": 2, "z": 2}, 200)
    check_that_losses_stay_together(losses)


def test_a_model_with_dropout_trains_alike_on_every_mesh() -> None:
    (expected,) = run_ranks(1, losses_on, {}, 1, "cpu")
    for sizes in ({}, {"x": 2}, {"pipe": 2}):
        for found in run_ranks(math.prod(sizes.values()), on_gpus, losses_on, sizes, 2):
            assert found == pytest.approx(expected, rel=1e-5), sizes


def test_every_strategy_reshards_between_any_meshes() -> None:
    run_ranks(8, on_gpus, reshard_at_random, 0, 6, 2, "cuda")
