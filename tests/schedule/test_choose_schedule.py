"""Where a schedule puts stages, and what it refuses: counts that do not fit, and models that lie elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from fxpar.errors import InvalidScheduleError, InvalidStagesError
from fxpar.schedule import DELAYED, SCHEDULE_NAMES, Costs, build_schedule, chain, uniform_costs
from fxpar.schedule.choose_schedule import check_placement, choose_placement, choose_schedule, num_stages_of

NUM_PIPE_RANKS = 2
FOLDED = "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"


def _costs(num_stages: int, **overrides: Any) -> Costs:
    times = {"F": [1.0] * num_stages, "I": [1.0] * num_stages, "W": [1.0] * num_stages, **overrides}
    placement = [stage % NUM_PIPE_RANKS for stage in range(num_stages)]
    return uniform_costs(placement, chain(num_stages), times, 3.0, 3.0)


def test_without_a_count_there_are_as_many_stages_as_the_schedule_runs() -> None:
    assert num_stages_of("interleaved", NUM_PIPE_RANKS) == 4
    assert num_stages_of(FOLDED, NUM_PIPE_RANKS) == 4
    assert {num_stages_of(name, NUM_PIPE_RANKS) for name in SCHEDULE_NAMES if name != "interleaved"} == {2}


def test_stages_are_placed_as_the_schedule_runs_them() -> None:
    assert choose_placement("zb-h1", 2, NUM_PIPE_RANKS) == (0, 1)
    assert choose_placement("interleaved", 6, NUM_PIPE_RANKS) == (0, 1, 0, 1, 0, 1)
    assert choose_placement(FOLDED, 4, NUM_PIPE_RANKS) == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "message"),
    [
        ("1f1b", 3, "has 3 stages, but the mesh has pipe=2, for which '1f1b' runs 2"),
        ("interleaved", 3, "has 3 stages, but the mesh has pipe=2, for which 'interleaved' runs a multiple of 2"),
        (FOLDED, 2, "runs 4 stages on 2 pipe ranks, but the model has 2 and the mesh has pipe=2"),
        ("0F0 1F0 1B0 0B0", 2, "runs 2 stages on 1 pipe ranks, but the model has 2 and the mesh has pipe=2"),
    ],
)
def test_another_number_of_stages_than_it_runs_is_refused(schedule: str, num_stages: int, message: str) -> None:
    with pytest.raises(InvalidStagesError, match=message):
        choose_placement(schedule, num_stages, NUM_PIPE_RANKS)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_name_is_built_for_the_stages_and_ranks_there_are(name: str) -> None:
    num_stages = num_stages_of(name, NUM_PIPE_RANKS)
    chosen = choose_schedule(name, _costs(num_stages), NUM_PIPE_RANKS, 4)
    assert (chosen.num_stages, len(chosen.ranks), chosen.num_microbatches) == (num_stages, 2, 4)
    assert chosen.placement == choose_placement(name, num_stages, NUM_PIPE_RANKS)


def test_weight_gradients_are_delayed_by_what_gradients_cost() -> None:
    near, far = _costs(2, W=[1.0, 9.0]), _costs(2, W=[1.0, 1.0])
    assert choose_schedule(DELAYED, near, NUM_PIPE_RANKS, 8) == build_schedule(DELAYED, 2, 8, delays=[0, 1])
    assert choose_schedule(DELAYED, far, NUM_PIPE_RANKS, 8) == build_schedule(DELAYED, 2, 8, delays=[0, 3])


@pytest.mark.parametrize(("num_stages", "microbatches"), [(4, 2), (2, 1)])
def test_ones_own_schedule_for_other_counts_is_refused(num_stages: int, microbatches: int) -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        choose_schedule(FOLDED, _costs(num_stages), NUM_PIPE_RANKS, microbatches)
    expected = f"expected {num_stages} stages on 2 pipe ranks, and {microbatches} microbatches"
    assert str(caught.value).startswith("custom: it has actions for 4 stages on 2 pipe ranks, and 1 microbatches")
    assert expected in str(caught.value)


def test_a_schedule_is_refused_for_a_model_that_lies_elsewhere() -> None:
    schedule = build_schedule("interleaved", 4, 2, num_ranks=2)
    check_placement(schedule, [0, 1, 0, 1])
    with pytest.raises(InvalidScheduleError) as caught:
        check_placement(schedule, [0, 1, 1, 0])
    assert str(caught.value) == (
        "interleaved: it runs stages on pipe ranks (0, 1, 0, 1), but the model was distributed for (0, 1, 1, 0); "
        "give this schedule to `distribute`"
    )
