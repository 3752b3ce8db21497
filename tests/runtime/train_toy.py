"""What a rank does to train the toy pipeline; apart from the tests, so that ranks start without their libraries."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.runtime.edge_transport import EdgeTransport
from fxpar.schedule import Schedule, build_schedule
from fxpar.transport.shared_segment import share_memory
from fxpar.world.mesh import Mesh, init_mesh
from tests.runtime.toy_executor import make_connections, make_executor, run_step
from tests.runtime.toy_pipeline import ROWS, Toy, whole_values
from tests.runtime.toy_stages import compiled_stages
from tests.support.move_tensors import live_on


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
    stages = compiled_stages(toy, mesh, schedule)
    executor = make_executor(toy, mesh, schedule, stages, make_connections(toy, mesh, schedule, stages))
    values = whole_values(toy, ROWS * schedule.num_microbatches * mesh.data)
    count = values["count"].clone()
    done = []
    for _ in range(steps):
        count.copy_(values["count"])
        done.append(run_step(toy, executor, mesh, stages, values, count))
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

    (stage,) = compiled_stages(toy, mesh, schedule)
    forward, stages = stage.forward, [replace(stage, forward=watched)]
    connections = make_connections(toy, mesh, schedule, stages)
    executor = make_executor(toy, mesh, schedule, stages, connections)
    values = whole_values(toy, ROWS * schedule.num_microbatches)
    run_step(toy, executor, mesh, stages, values, values["count"].clone())
    return peak


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank's transfers take after a step, in bytes: pool, and of the memory it shares what is there and used."""

    buffers: int
    committed: int
    in_use: int


class _Late:
    """A way of `microbatches` per step, none of which is waited for before all have been sent."""

    def __init__(self, way: EdgeTransport, microbatches: int) -> None:
        self._way, self._microbatches = way, microbatches
        self.post_receive, self.complete, self.finish = way.post_receive, way.complete, way.finish
        self.forget = way.forget
        self._num_sent = self._num_awaited = 0

    def send(self, value: Tensor, microbatch: int) -> Any:
        shipment = self._way.send(value, microbatch)
        self._num_sent += 1
        if self._num_sent % self._microbatches == 0:
            dist.barrier()
        return shipment

    def wait(self, receipt: Any) -> Tensor:
        if self._num_awaited % self._microbatches == 0:
            dist.barrier()
        self._num_awaited += 1
        return self._way.wait(receipt)


def memory_by_step(toy: Toy, sizes: Mapping[str, int], steps: int, ranks_per_host: int) -> list[Memory]:
    """Two stages, each of which receives as late as it can, so that every step has as much under way as can be."""
    live_on(dist.get_rank() // ranks_per_host)
    mesh, schedule = init_mesh(**sizes), build_schedule("gpipe", 2, 4)
    stages = compiled_stages(toy, mesh, schedule)
    connections = make_connections(toy, mesh, schedule, stages)
    late = {key: _Late(way, schedule.num_microbatches) for key, way in connections.traffic.items()}
    executor = make_executor(toy, mesh, schedule, stages, replace(connections, traffic=late))
    values, heap, found = whole_values(toy, ROWS * schedule.num_microbatches), share_memory().own.heap, []
    for _ in range(steps):
        run_step(toy, executor, mesh, stages, values, values["count"].clone())
        found.append(Memory(connections.buffers.num_bytes, heap.committed_bytes, heap.bytes_in_use))
    return found


class _Left(Exception):
    """A rank leaves in the midst of a step."""


def lose_a_stage(toy: Toy, sizes: Mapping[str, int], ranks_per_host: int) -> tuple[str, int]:
    """The last stage leaves in the midst of the second step: the first one's error, and how many values it keeps."""
    live_on(dist.get_rank() // ranks_per_host)
    mesh, schedule = init_mesh(**sizes), build_schedule("gpipe", 2, 4)
    (stage,), made = compiled_stages(toy, mesh, schedule), list[weakref.ref[Tensor]]()

    def watched(*inputs: Tensor) -> Sequence[Tensor]:
        if mesh.coordinate["pipe"] == 1 and len(made) == 5:
            raise _Left
        values = stage.forward(*inputs)
        made.append(weakref.ref(values[-1]))  # kept for the backward
        return values

    stages = [replace(stage, forward=watched)]
    connections = make_connections(toy, mesh, schedule, stages, timeout_s=2)
    executor = make_executor(toy, mesh, schedule, stages, connections)
    values, message = whole_values(toy, ROWS * schedule.num_microbatches), ""
    try:
        for _ in range(2):
            run_step(toy, executor, mesh, stages, values, values["count"].clone())
    except PeerLostError as error:
        message = str(error)
    except _Left:
        dist.destroy_process_group()
    return message, sum(ref() is not None for ref in made)


def fail_between_stages(toy: Toy) -> int:
    """A stage fails on the rank that has made its values: how many of these it keeps."""
    mesh, schedule = init_mesh(), Schedule.parse("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")
    first, second = compiled_stages(toy, mesh, schedule)
    made = list[weakref.ref[Tensor]]()

    def watched(*inputs: Tensor) -> Sequence[Tensor]:
        values = first.forward(*inputs)
        made.extend(map(weakref.ref, values[: len(first.outputs)]))
        return values

    def failing(*inputs: Tensor) -> Sequence[Tensor]:
        raise _Left

    stages = [replace(first, forward=watched), replace(second, forward=failing)]
    connections = make_connections(toy, mesh, schedule, stages)
    executor = make_executor(toy, mesh, schedule, stages, connections)
    values = whole_values(toy, ROWS * schedule.num_microbatches)
    with suppress(_Left):
        run_step(toy, executor, mesh, stages, values, values["count"].clone())
    assert made, "the first stage ran"
    return sum(ref() is not None for ref in made)
