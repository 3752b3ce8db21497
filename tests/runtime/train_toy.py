"""What a rank does to train the toy pipeline; apart from the tests, so that ranks start without their libraries."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from fxpar.mesh import Mesh, init_mesh
from fxpar.schedule import Schedule
from tests.reshard.move_tensors import live_on
from tests.runtime.toy_pipeline import ROWS, Toy, compiled_stage, make_executor, run_step, whole_values


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank has after each step: losses, gradients, predictions by microbatch; and its buffer in the end."""

    losses: list[Tensor | None]
    gradients: list[dict[str, Tensor]]
    predictions: list[Sequence[Tensor] | None]
    count: Tensor


def train(
    toy: Toy, sizes: Mapping[str, int], schedules: Sequence[Schedule], steps: int, ranks_per_host: int
) -> list[Outcome]:
    """Some steps by each schedule, each step from the same values."""
    live_on(dist.get_rank() // ranks_per_host)
    mesh = init_mesh(**sizes)
    return [_train(toy, mesh, schedule, steps) for schedule in schedules]


def _train(toy: Toy, mesh: Mesh, schedule: Schedule, steps: int) -> Outcome:
    executor, _ = make_executor(toy, mesh, schedule, compiled_stage(toy, mesh, schedule))
    values = whole_values(toy, ROWS * schedule.num_microbatches * mesh.data)
    count = values["count"].clone()
    done = []
    for _ in range(steps):
        count.copy_(values["count"])
        done.append(run_step(toy, executor, mesh, values, count))
    predictions = [result.results.get(1) for result in done]
    return Outcome([result.loss for result in done], [result.gradients for result in done], predictions, count)


def most_alive(toy: Toy, sizes: Mapping[str, int], schedule: Schedule) -> int:
    """Of how many microbatches this rank holds what its forward made, at most; a step's results apart."""
    mesh = init_mesh(**sizes)
    made: list[list[weakref.ref[Tensor]]] = []
    peak = 0

    def watched(*inputs: Tensor) -> Sequence[Tensor]:
        nonlocal peak
        values = forward(*inputs)
        made.append([weakref.ref(v) for v in values if all(v is not i for i in inputs)])
        peak = max(peak, sum(any(ref() is not None for ref in refs) for refs in made))
        return values

    stage = compiled_stage(toy, mesh, schedule)
    forward = stage.forward
    executor, _ = make_executor(toy, mesh, schedule, replace(stage, forward=watched))
    values = whole_values(toy, ROWS * schedule.num_microbatches)
    run_step(toy, executor, mesh, values, values["count"].clone())
    return peak
