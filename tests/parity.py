"""The measure of right: a step on any mesh equals the same step on one process, loss and every gradient."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.bench.models import GPT2_HINTS, LLAMA_HINTS
from fxpar.hints import Entry
from fxpar.schedule import SCHEDULE_NAMES
from tests.small_models import hf_gpt2, hf_llama

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Config  # the example's model: it is no package

BATCH, LENGTH, VOCABULARY = 8, 12, 96
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its Megatron hints, its layers (which may open stages), and how its forward is called."""

    build: Callable[[], nn.Module]
    hints: Mapping[str, Sequence[Entry]]
    layers: str
    arguments: tuple[str, str]


SUBJECTS = {
    "gpt": Subject(
        lambda: GPT(Config(vocabulary=VOCABULARY, context=LENGTH, layers=4, heads=4, hidden=24, tied=True)),
        {
            "blocks.*.attention.qkv.weight": ("x", None),
            "blocks.*.attention.out.weight": (None, "x"),
            "blocks.*.mlp.fc.weight": ("x", None),
            "blocks.*.mlp.out.weight": (None, "x"),
        },
        "blocks",
        ("tokens", "targets"),
    ),
    "gpt2": Subject(
        lambda: hf_gpt2(layers=4),
        GPT2_HINTS,
        "transformer.h",
        ("input_ids", "labels"),
    ),
    "llama": Subject(
        lambda: hf_llama(layers=4),
        LLAMA_HINTS,
        "model.layers",
        ("input_ids", "labels"),
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A distributed training run that must equal the one on a single process: some steps under each schedule."""

    subject: str
    mesh: Mapping[str, int]
    microbatches: int
    lowering: str = "aten"
    schedules: tuple[str, ...] = SCHEDULE_NAMES
    steps: int = 2
    strategy: str = "broadcast"


def stage_openers(layers: str, num_stages: int, num_layers: int = 4) -> list[str]:
    """Cut `num_layers` layers into stages of equal length."""
    return [f"{layers}.{stage * num_layers // num_stages}" for stage in range(1, num_stages)]


def check_runs_between_hosts(runs: Sequence[Run], ranks_per_host: int) -> None:
    """As `check_runs`, where ranks of different hosts do not use each other's memory. For `run_ranks`."""
    os.environ["FXPAR_HOST"] = f"host {dist.get_rank() // ranks_per_host}"
    check_runs(runs)


def check_runs(runs: Sequence[Run]) -> None:
    """Train every run on this rank and compare with plain training; all have one mesh. For `run_ranks`."""
    mesh = fxpar.init_mesh(**runs[0].mesh)
    for run in runs:
        check_run(run, mesh)


def check_run(run: Run, mesh: fxpar.Mesh) -> None:
    """Compare each step's loss, gradients and their norm, with AdamW in between."""
    subject = SUBJECTS[run.subject]
    torch.manual_seed(0)
    alone = subject.build()
    model = copy.deepcopy(alone)
    turns = [schedule for schedule in run.schedules for _ in range(run.steps)]
    batches = [_batch(subject, BATCH * mesh.data) for _ in turns]
    mine = [{k: v.chunk(mesh.data)[fxpar.batch_rank(mesh)] for k, v in batch.items()} for batch in batches]
    fxpar.distribute(
        model,
        mesh,
        stages=stage_openers(subject.layers, mesh.pipe),
        layouts=subject.hints,
        microbatches=run.microbatches,
        example_inputs=mine[0],
    )
    options = {"lowering": run.lowering, "strategy": run.strategy}
    compiled = {
        schedule: torch.compile(model, backend="fxpar", options={**options, "schedule": schedule})
        for schedule in run.schedules
    }
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
    for number, (schedule, whole, part) in enumerate(zip(turns, batches, mine, strict=True)):
        expected, found = _loss(alone(**whole)), _loss(compiled[schedule](**part))
        expected.backward()
        found.backward()
        _compare(f"{run}, step {number} under {schedule}", expected, found, alone, model)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        torch.testing.assert_close(fxpar.clip_grad_norm_(model.parameters(), 1.0), norm, rtol=1e-4, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _batch(subject: Subject, size: int) -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, (size, LENGTH)) for name in subject.arguments}


def _loss(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, torch.Tensor) else output["loss"]
    return loss


def _compare(where: str, expected: Tensor, found: Tensor, alone: nn.Module, model: nn.Module) -> None:
    torch.testing.assert_close(found, expected, rtol=LOSS_TOLERANCE, atol=0, msg=lambda text: f"{where}, loss: {text}")
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = wanted[name].grad
        assert gradient is not None
        assert parameter.grad is not None, f"{where}: {name} got no gradient"
        error = (parameter.grad.full_tensor() - gradient).abs().max() / gradient.abs().max()
        assert error <= GRADIENT_TOLERANCE, f"{where}, gradient of {name}: relative error {error:.1e}"
