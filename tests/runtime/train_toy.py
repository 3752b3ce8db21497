"""What a rank does to train the toy pipeline; apart from the tests, so that ranks start without their libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpar.mesh import Mesh, init_mesh
from fxpar.schedule import Schedule
from tests.runtime.toy_pipeline import ROWS, Toy, make_executor, run_step, whole_values


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank has after each step: losses, gradients, predictions by microbatch; and its buffer in the end."""

    losses: list[Tensor | None]
    gradients: list[dict[str, Tensor]]
    predictions: list[Sequence[Tensor] | None]
    count: Tensor


def train(toy: Toy, sizes: Mapping[str, int], schedules: Sequence[Schedule], steps: int) -> list[Outcome]:
    """Some steps by each schedule, each step from the same values."""
    mesh = init_mesh(**sizes)
    return [_train(toy, mesh, schedule, steps) for schedule in schedules]


def _train(toy: Toy, mesh: Mesh, schedule: Schedule, steps: int) -> Outcome:
    executor = make_executor(toy, mesh, schedule)
    values = whole_values(toy, ROWS * schedule.num_microbatches * mesh.data)
    count = values["count"].clone()
    done = []
    for _ in range(steps):
        count.copy_(values["count"])
        done.append(run_step(toy, executor, mesh, values, count))
    predictions = [result.results.get(1) for result in done]
    return Outcome([result.loss for result in done], [result.gradients for result in done], predictions, count)
