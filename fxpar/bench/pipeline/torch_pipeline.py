"""Steps of torch.distributed.pipelining with the same model, stages, microbatches and orders as fxpar's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fxpar._torch.distributed import pipeline_schedule_of_csv
from fxpar.bench.pipeline.torch_stages import TorchStage, torch_stages
from fxpar.schedule import build_schedule, write_csv

TorchSchedule: TypeAlias = Literal["Schedule1F1B", "eager order"]
"""Torch's own 1F1B, which waits for messages when it needs them; or the order of eager-1F1B, run by torch's runtime for
custom schedules, which posts every receive as early as the order of sends allows."""
TORCH_SCHEDULES: tuple[TorchSchedule, ...] = get_args(TorchSchedule)


Step: TypeAlias = Callable[[], float]
"""Forward and backward of all microbatches, from no gradients to finished ones. Returns the loss on the last rank, NaN
on the others; the gradients of a rank's stage are in its model."""


def torch_steps(
    model: nn.Module, batch: Mapping[str, Tensor], stages: Sequence[str], microbatches: int, *, compiled: bool
) -> dict[TorchSchedule, Step]:
    """A step under each schedule, over the same stage modules; every rank makes them, and runs the same ones in order.

    The ranks are those of the default process group. Each runs one stage, on the CPU.

    Args:
        model: the same on every rank; its forward returns a mean loss over the batch.
        batch: the forward's arguments by keyword, the same on every rank; the first dim of each is the batch.
        stages: paths of the modules that open the second and later stages.
        compiled: by Inductor, at the first step; otherwise stages run op by op.
    """
    ranks, num_stages = dist.get_world_size(), len(stages) + 1
    assert ranks == num_stages, f"{num_stages} stages on {ranks} ranks"
    part = torch_stages(model, batch, stages, microbatches)[dist.get_rank()]
    if compiled:
        part.module.compile()
    return {schedule: _step(part, batch, microbatches, schedule) for schedule in TORCH_SCHEDULES}


def _step(part: TorchStage, batch: Mapping[str, Tensor], microbatches: int, schedule: TorchSchedule) -> Step:
    # With the shapes of inputs and outputs given, torch does not infer them: it would infer gradients with strides that
    # gloo refuses.
    like = part.arriving, part.leaving
    stage = PipelineStage(part.module, dist.get_rank(), dist.get_world_size(), torch.device("cpu"), *like)
    run = _schedule(stage, microbatches, schedule)
    inputs: dict[str, Any] = part.keywords(batch)
    # The last stage computes the loss itself, but torch requires a target for each microbatch.
    target = torch.zeros(microbatches) if stage.is_last else None

    def step() -> float:
        losses: list[Tensor] = []
        part.module.zero_grad()
        run.step(target=target, losses=losses, return_outputs=False, **inputs)
        return sum(loss.item() for loss in losses) if losses else math.nan

    return step


def _schedule(stage: PipelineStage, microbatches: int, schedule: TorchSchedule) -> Schedule1F1B | PipelineScheduleMulti:
    def share(loss: Tensor, target: Tensor) -> Tensor:
        """A microbatch's part of the mean: dividing it costs less than dividing all gradients at the end."""
        return loss / microbatches

    if schedule == "Schedule1F1B":
        return Schedule1F1B(stage, microbatches, loss_fn=share, scale_grads=False)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        write_csv(build_schedule("eager-1f1b", stage.num_stages, microbatches), path)
        return pipeline_schedule_of_csv(path, stage, microbatches, share)
