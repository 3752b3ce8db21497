"""The checker accepts what lowering makes of any schedule, over any edges."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.schedule import (
    INTERLEAVED,
    SCHEDULE_NAMES,
    Edge,
    Schedule,
    build_schedule,
    chain,
    check_programs,
    forward_only,
    lower,
)
from tests.schedule.edges import edge_lists

SIZES = [*product(range(1, 9), (1, 2, 3, 5, 8, 13, 32))]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_all_named_schedules_are_accepted_over_a_chain(name: str) -> None:
    for num_stages, num_microbatches in SIZES:
        schedule, edges = build_schedule(name, num_stages, num_microbatches), chain(num_stages)
        check_programs(lower(schedule, edges), schedule, edges)


def _skipping(num_stages: int) -> list[Edge]:
    """Neighbours, a U of skip connections, a multicast to all, and a value without gradient."""
    across = [Edge(f"skip{s}", s, (num_stages - 1 - s,)) for s in range(num_stages // 2 - 1)]
    rest = tuple(range(1, num_stages))
    shared = [Edge("shared", 0, rest), Edge("mask", 0, rest[-2:], differentiable=False)] if rest else []
    return [*chain(num_stages), *across, *shared]


@pytest.mark.parametrize("lookahead", [None, 0, 1])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_all_named_schedules_are_accepted_over_skip_connections_and_multicasts(
    name: str, lookahead: int | None
) -> None:
    for num_stages, num_microbatches in product(range(1, 9), (1, 2, 3, 7, 16)):
        schedule, edges = build_schedule(name, num_stages, num_microbatches), _skipping(num_stages)
        check_programs(lower(schedule, edges, lookahead), schedule, edges)


@pytest.mark.parametrize("lookahead", [None, 0, 1])
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_interleaved_stages_are_accepted(stages_per_rank: int, lookahead: int | None) -> None:
    for num_ranks, num_microbatches in product((1, 2, 3, 4, 8), (1, 2, 3, 7, 16)):
        num_stages = num_ranks * stages_per_rank
        schedule = build_schedule(INTERLEAVED, num_stages, num_microbatches, num_ranks=num_ranks)
        for edges in (chain(num_stages), _skipping(num_stages)):
            check_programs(lower(schedule, edges, lookahead), schedule, edges)


@given(st.data(), st.sampled_from(SCHEDULE_NAMES), st.integers(2, 5), st.integers(1, 6), st.booleans())
def test_all_named_schedules_are_accepted_over_any_edges_and_lookahead(
    data: st.DataObject, name: str, num_stages: int, num_microbatches: int, training: bool
) -> None:
    schedule = build_schedule(name, num_stages, num_microbatches)
    schedule = schedule if training else forward_only(schedule)
    edges = data.draw(edge_lists(num_stages))
    check_programs(lower(schedule, edges, data.draw(st.none() | st.integers(0, 4))), schedule, edges)


def test_a_split_backward_is_accepted() -> None:
    schedule = Schedule.parse("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1F1 1W0 1I1 1W1")
    edges = [Edge("h", 0, (1,))]
    check_programs(lower(schedule, edges), schedule, edges)
