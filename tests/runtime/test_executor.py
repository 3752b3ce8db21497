"""A step on any mesh equals the same step in one process: loss, gradients, results and buffers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from fxpar.ir.layout import Layout, Shard
from fxpar.ir.tiles import assemble
from fxpar.schedule import SCHEDULE_NAMES, Schedule, build_schedule, forward_only, peak_in_flight
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh
from tests.runtime.toy_pipeline import ROWS, WIDTH, Expected, Toy, owners, run_alone, whole_values
from tests.runtime.train_toy import Outcome, fail_between_stages, lose_a_stage, memory_by_step, most_alive, train

WHOLE = Layout((ROWS, WIDTH))
RAGGED_ROWS = WHOLE.with_placement("x", Shard(0, 2))
COLUMNS = WHOLE.with_placement("x", Shard(1, 2))
INSIDE = WHOLE.with_placement("x", Shard(1, 2, outer=3))
TWO_BY_TWO = {"pipe": 2, "x": 2}


def every_schedule(pipe: int, counts: Sequence[int] = (2, 4)) -> list[Schedule]:
    return [build_schedule(name, pipe, microbatches) for name, microbatches in product(SCHEDULE_NAMES, counts)]


def check(toy: Toy, sizes: Mapping[str, int], schedules: Sequence[Schedule], ranks_per_host: int = 8) -> None:
    """Two steps by each schedule: the second one meets what the first one left behind."""
    mesh, steps = Mesh(**sizes), 2
    outcomes = run_ranks(mesh.num_ranks, train, toy, sizes, schedules, steps, ranks_per_host, timeout_s=100)
    for position, schedule in enumerate(schedules):
        values = whole_values(toy, ROWS * schedule.num_microbatches * mesh.data)
        expected = run_alone(toy, values, mesh.data, schedule.num_microbatches)
        ranks = [outcome[position] for outcome in outcomes]
        for step in range(steps):
            where = f"{schedule.name}, {schedule.num_microbatches} microbatches, step {step}"
            _check_results(mesh, schedule.placement, ranks, step, expected, where)
            if schedule.has_backward:
                _check_gradients(toy, mesh, schedule.placement, ranks, step, expected, where)


def _check_results(
    mesh: Mesh, placement: Sequence[int], ranks: Sequence[Outcome], step: int, expected: Expected, where: str
) -> None:
    for rank, outcome in enumerate(ranks):
        _close(outcome.losses[step], expected.loss, f"{where}: loss on rank {rank}")
        at = mesh.coordinate_of(rank)
        predictions = outcome.predictions[step]
        if at["pipe"] != placement[-1]:
            assert predictions is None, f"{where}: rank {rank} has results"
            continue
        assert predictions is not None, f"{where}: rank {rank} has no results"
        for found, prediction in zip(predictions, expected.predictions[at["data"]], strict=True):
            _close(found, prediction, f"{where}: a prediction on rank {rank}")
        _close(outcome.count, expected.counts[0], f"{where}: buffer on rank {rank}, of the first batch shard")


def _check_gradients(
    toy: Toy,
    mesh: Mesh,
    placement: Sequence[int],
    ranks: Sequence[Outcome],
    step: int,
    expected: Expected,
    where: str,
) -> None:
    for rank, outcome in enumerate(ranks):
        pipe = mesh.coordinate_of(rank)["pipe"]
        owned = {n for n, planned in owners(toy).items() if placement[planned.stage] == pipe}
        assert outcome.gradients[step].keys() == owned, f"{where}: rank {rank} has gradients of others' parameters"
    for name, planned in owners(toy).items():
        for data in range(mesh.data):
            places = [at for at in mesh.stage_coordinates(placement[planned.stage]) if at["data"] == data]
            pieces = [(at, ranks[mesh.rank_at(at)].gradients[step][name]) for at in places]
            found = assemble(pieces, planned.layout)
            _close(found, expected.gradients[name], f"{where}: gradient of {name} in batch shard {data}")


def _close(found: Tensor | None, expected: Tensor, what: str) -> None:
    assert found is not None, f"{what} is missing"
    torch.testing.assert_close(found, expected, msg=lambda difference: f"{what}: {difference}")


def test_one_rank() -> None:
    check(Toy([WHOLE]), {}, every_schedule(1))


@pytest.mark.parametrize("ranks_per_host", [8, 2, 1])
@pytest.mark.parametrize("pipe", [2, 3, 4])
def test_a_pipeline_with_skips_shared_values_and_a_tied_parameter(pipe: int, ranks_per_host: int) -> None:
    check(Toy([WHOLE] * pipe), {"pipe": pipe}, every_schedule(pipe, (1, 2, 4, 8)), ranks_per_host)


@pytest.mark.parametrize("ranks_per_host", [8, 2, 1])
@pytest.mark.parametrize("first", [RAGGED_ROWS, COLUMNS, INSIDE], ids=str)
def test_stages_whose_layouts_differ(first: Layout, ranks_per_host: int) -> None:
    check(Toy([first, WHOLE]), {"pipe": 2, "x": 2}, every_schedule(2), ranks_per_host)


@pytest.mark.parametrize("ranks_per_host", [8, 2, 1])
def test_batch_shards(ranks_per_host: int) -> None:
    check(Toy([WHOLE] * 2), {"pipe": 2, "data": 2}, every_schedule(2), ranks_per_host)
    check(Toy([WHOLE]), {"data": 3}, every_schedule(1))


def test_copies_of_batch_shards() -> None:
    check(Toy([WHOLE]), {"data": 2, "x": 2}, every_schedule(1))


def test_without_gradients_only_forwards_run() -> None:
    schedules = [forward_only(schedule) for schedule in every_schedule(3)]
    check(Toy([WHOLE] * 3), {"pipe": 3}, schedules)


@pytest.mark.parametrize("ranks_per_host", [8, 1])
def test_several_stages_on_each_rank(ranks_per_host: int) -> None:
    """Edges stay on a rank, come to one that has two readers of them, and a parameter is used by two stages of one."""
    for pipe, num_stages in ((1, 3), (2, 4), (2, 6), (3, 6)):
        schedules = [build_schedule("interleaved", num_stages, count, num_ranks=pipe) for count in (1, 2, 5)]
        check(Toy([WHOLE] * num_stages), {"pipe": pipe}, schedules, ranks_per_host)


def test_stages_of_one_rank_whose_layouts_differ() -> None:
    schedules = [build_schedule("interleaved", 4, count, num_ranks=2) for count in (1, 4)]
    check(Toy([RAGGED_ROWS, WHOLE, COLUMNS, WHOLE]), TWO_BY_TWO, schedules)


def test_a_schedule_may_run_backwards_in_any_order() -> None:
    orders = "0F0 0F1 0F2 0B2 0B0 0B1\n1F0 1F1 1B1 1F2 1B2 1B0"
    check(Toy([WHOLE] * 2), {"pipe": 2}, [Schedule.parse(orders)])


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_a_microbatch_made_is_freed_with_its_backward(name: str) -> None:
    schedule = build_schedule(name, 3, 8)
    alive = run_ranks(3, most_alive, Toy([WHOLE] * 3), {"pipe": 3}, schedule)
    # The last stage keeps its losses and predictions, which users asked for.
    assert alive[:-1] == list(peak_in_flight(schedule))[:-1]


@pytest.mark.parametrize("ranks_per_host", [8, 1])
def test_steps_take_no_more_memory_after_warm_up(ranks_per_host: int) -> None:
    for rank, by_step in enumerate(run_ranks(4, memory_by_step, Toy([INSIDE, WHOLE]), TWO_BY_TWO, 10, ranks_per_host)):
        assert by_step[0].buffers > 0
        assert by_step[2] == by_step[-1], f"rank {rank}: {by_step}"


@pytest.mark.parametrize("ranks_per_host", [8, 1])
def test_a_step_that_loses_a_stage_names_the_edge_and_keeps_nothing(ranks_per_host: int) -> None:
    (message, num_kept), _ = run_ranks(2, lose_a_stage, Toy([WHOLE] * 2), {"pipe": 2}, ranks_per_host, timeout_s=100)
    assert re.match(r"lost rank 1 while moving .*of edge \w+ from stage \d to stage \d", message), message
    assert num_kept == 0


def test_a_step_that_fails_between_stages_of_one_rank_keeps_nothing() -> None:
    assert run_ranks(1, fail_between_stages, Toy([WHOLE] * 2)) == [0]
