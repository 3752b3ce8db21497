"""A step on any mesh equals the same step in one process: loss, gradients, results and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from fxpar.launch import run_ranks
from fxpar.layout import Layout, Shard
from fxpar.mesh import Mesh, init_mesh
from fxpar.schedule import SCHEDULE_NAMES
from fxpar.tiles import assemble
from tests.runtime.toy_pipeline import ROWS, WIDTH, Toy, make_executor, owners, run_alone, run_step, whole_values

WHOLE = Layout((ROWS, WIDTH))
RAGGED_ROWS = WHOLE.with_placement("x", Shard(0, 2))
COLUMNS = WHOLE.with_placement("x", Shard(1, 2))
INSIDE = WHOLE.with_placement("x", Shard(1, 2, outer=3))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank has after each step."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    predictions: Sequence[Tensor] | None
    count: Tensor


def train(toy: Toy, sizes: Mapping[str, int], configurations: Sequence[tuple[str, int]], steps: int) -> list[Outcome]:
    """On one rank: some steps by each (schedule, microbatches)."""
    mesh = init_mesh(**sizes)
    return [_train(toy, mesh, schedule, microbatches, steps) for schedule, microbatches in configurations]


def _train(toy: Toy, mesh: Mesh, schedule: str, microbatches: int, steps: int) -> Outcome:
    executor = make_executor(toy, mesh, schedule, microbatches)
    values = whole_values(toy, ROWS * microbatches * mesh.data)
    count = values["count"].clone()
    done = []
    for _ in range(steps):
        count.copy_(values["count"])
        done.append(run_step(toy, executor, mesh, values, count))
    return Outcome(
        [result.loss for result in done], [result.gradients for result in done], done[-1].results.get(1), count
    )


def check(toy: Toy, sizes: Mapping[str, int], configurations: Sequence[tuple[str, int]], steps: int = 2) -> None:
    mesh = Mesh(**sizes)
    outcomes = run_ranks(mesh.num_ranks, train, toy, sizes, configurations, steps, timeout_s=60)
    for position, (schedule, microbatches) in enumerate(configurations):
        ranks = [outcome[position] for outcome in outcomes]
        values = whole_values(toy, ROWS * microbatches * mesh.data)
        expected = run_alone(toy, values, mesh.data, microbatches)
        where = f"{schedule}, {microbatches} microbatches"
        for rank, step in product(range(mesh.num_ranks), range(steps)):
            _close(ranks[rank].losses[step], expected.loss, f"{where}: loss on rank {rank} in step {step}")
        for name, planned in owners(toy).items():
            for step, data in product(range(steps), range(mesh.data)):
                found = _assembled(mesh, ranks, planned.stage, planned.layout, data, name, step)
                _close(found, expected.gradients[name], f"{where}: gradient of {name} in step {step}")
        for rank, outcome in enumerate(ranks):
            at = mesh.coordinate_of(rank)
            owned = {name for name, planned in owners(toy).items() if planned.stage == at["pipe"]}
            assert outcome.gradients[-1].keys() == owned, f"{where}: rank {rank} has gradients of others' parameters"
            if at["pipe"] < mesh.pipe - 1:
                assert outcome.predictions is None, f"{where}: rank {rank} has results"
                continue
            for microbatch, prediction in enumerate(expected.predictions[at["data"]]):
                _close(outcome.predictions[microbatch], prediction, f"{where}: prediction {microbatch} on rank {rank}")
            _close(outcome.count, expected.counts[at["data"]], f"{where}: buffer on rank {rank}")


def _assembled(
    mesh: Mesh, ranks: Sequence[Outcome], pipe: int, layout: Layout, data: int, name: str, step: int
) -> Tensor:
    pieces = []
    for at in mesh.stage_coordinates(pipe):
        if at["data"] == data:
            pieces.append((at, ranks[mesh.rank_at(at)].gradients[step][name]))
    return assemble(pieces, layout)


def _close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda difference: f"{what}: {difference}")


EVERY = list(product(SCHEDULE_NAMES, (1, 2, 4, 8)))
SOME = [("gpipe", 2), ("1f1b", 4), ("eager-1f1b", 4)]


def test_one_rank() -> None:
    check(Toy([WHOLE]), {}, SOME)


@pytest.mark.parametrize("pipe", [2, 3, 4])
def test_a_pipeline_with_skips_shared_values_and_a_lent_parameter(pipe: int) -> None:
    check(Toy([WHOLE] * pipe), {"pipe": pipe}, EVERY)


@pytest.mark.parametrize("first", [RAGGED_ROWS, COLUMNS, INSIDE], ids=str)
def test_stages_whose_layouts_differ(first: Layout) -> None:
    check(Toy([first, WHOLE]), {"pipe": 2, "x": 2}, SOME)


def test_batch_shards() -> None:
    check(Toy([WHOLE] * 2), {"pipe": 2, "data": 2}, SOME)
    check(Toy([WHOLE]), {"data": 3}, SOME)


def test_copies_of_batch_shards() -> None:
    check(Toy([WHOLE]), {"data": 2, "x": 2}, SOME)
