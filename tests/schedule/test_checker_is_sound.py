"""Whatever is done to programs and schedules: what the checker accepts runs to its end under any timing."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import (
    SCHEDULE_NAMES,
    Action,
    Edge,
    Program,
    Schedule,
    build_schedule,
    chain,
    check_programs,
    lower,
    read_schedule,
)
from tests.schedule.any_timing import QueuedRun, TimedRun

T = TypeVar("T")
EDGES = [*chain(4), Edge("skip", 0, (2, 3)), Edge("mask", 1, (3,), differentiable=False)]


def _edges(num_stages: int, *, multicast: bool = True) -> list[Edge]:
    """Those of `EDGES` within so many stages."""
    within = [(edge, tuple(t for t in edge.targets if t < num_stages)) for edge in EDGES]
    return [
        Edge(edge.name, edge.source, targets, edge.differentiable, multicast) for edge, targets in within if targets
    ]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_ranks, num_microbatches = draw(st.sampled_from([(1, 2), (2, 1), (2, 3), (3, 2), (4, 2)]))
    if num_ranks == 2 and draw(st.booleans()):
        return build_schedule("interleaved", 4, num_microbatches, num_ranks=num_ranks)
    return build_schedule(draw(st.sampled_from(SCHEDULE_NAMES)), num_ranks, num_microbatches)


def _mutated(draw: st.DrawFn, items: Sequence[T]) -> list[T]:
    """Without one, with one twice, with two swapped, or with one elsewhere."""
    found = list(items)
    places = st.integers(0, len(found) - 1)
    first, second = draw(places), draw(places)
    match draw(st.sampled_from(["drop", "duplicate", "swap", "swap neighbours", "move"])):
        case "drop":
            del found[first]
        case "duplicate":
            found.insert(second, found[first])
        case "swap":
            found[first], found[second] = found[second], found[first]
        case "swap neighbours":
            found[first - 1], found[first] = found[first], found[first - 1]
        case "move":
            found.insert(second, found.pop(first))
    return found


@st.composite
def mutated_programs(draw: st.DrawFn, *, multicast: bool = True) -> tuple[Schedule, list[Program]]:
    schedule = draw(schedules())
    edges = _edges(schedule.num_stages, multicast=multicast)
    programs = list(lower(schedule, edges, draw(st.sampled_from([None, 0, 1]))))
    for _ in range(draw(st.integers(1, 2))):
        rank = draw(st.integers(0, len(programs) - 1))
        programs[rank] = Program(rank, tuple(_mutated(draw, programs[rank].instructions)))
    return schedule, programs


def _check_that_it_runs(
    schedule: Schedule, programs: Sequence[Program], run: type[TimedRun], edges: Sequence[Edge], seed: int
) -> None:
    """If the checker accepts it, it runs under any timing."""
    try:
        check_programs(programs, schedule, edges)
    except InvalidScheduleError:
        return
    for more in range(3):
        assert run(programs, schedule, edges, seed + more).run()


@settings(max_examples=400)
@given(mutated_programs(), st.integers(0, 1000))
def test_a_program_that_is_accepted_runs_under_any_timing(given: tuple[Schedule, list[Program]], seed: int) -> None:
    _check_that_it_runs(*given, TimedRun, _edges(given[0].num_stages), seed)


@settings(max_examples=200)
@given(mutated_programs(multicast=False), st.integers(0, 1000))
def test_without_multicasts_it_does_so_in_queues_too(given: tuple[Schedule, list[Program]], seed: int) -> None:
    _check_that_it_runs(*given, QueuedRun, _edges(given[0].num_stages, multicast=False), seed)


@pytest.mark.parametrize("multicast", [False, True])
def test_in_queues_a_multicast_hangs_that_waits_for_who_asks_late(multicast: bool) -> None:
    """Stage 1 takes microbatch 1 first, for whose skip connection stage 2 does not ask before it has microbatch 0."""
    schedule = read_schedule("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1\n2F0 2F1 2B0 2B1")
    edges = [*chain(3), Edge("skip", 0, (1, 2), multicast=multicast)]
    programs = lower(schedule, edges, 0)
    check_programs(programs, schedule, edges)
    assert QueuedRun(programs, schedule, edges, 0).run() == (not multicast)
    assert TimedRun(programs, schedule, edges, 0).run()


@st.composite
def mutated_actions(draw: st.DrawFn) -> tuple[int, int, list[list[Action]]]:
    schedule = draw(schedules())
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(draw(st.integers(1, 4))):
        rank = draw(st.integers(0, len(ranks) - 1))
        ranks[rank] = _mutated(draw, ranks[rank]) if ranks[rank] else []
    return schedule.num_stages, schedule.num_microbatches, ranks


@settings(max_examples=400)
@given(mutated_actions(), st.integers(0, 1000))
def test_a_schedule_is_refused_or_hangs_under_every_timing_or_runs_under_every_timing(
    given: tuple[int, int, list[list[Action]]], seed: int
) -> None:
    num_stages, num_microbatches, ranks = given
    try:
        schedule = Schedule("mutated", num_stages, num_microbatches, tuple(map(tuple, ranks)))
    except InvalidScheduleError:
        return
    edges = _edges(num_stages)
    programs = lower(schedule, edges)
    try:
        check_programs(programs, schedule, edges)
        accepted = True
    except InvalidScheduleError:
        accepted = False
    for more in range(3):
        assert TimedRun(programs, schedule, edges, seed + more).run() == accepted


@given(schedules(), st.sampled_from([None, 0, 1, 2]), st.integers(0, 1000))
def test_what_lowering_makes_runs_under_any_timing(schedule: Schedule, lookahead: int | None, seed: int) -> None:
    for run, multicast in ((TimedRun, True), (TimedRun, False), (QueuedRun, False)):
        edges = _edges(schedule.num_stages, multicast=multicast)
        assert run(lower(schedule, edges, lookahead), schedule, edges, seed).run()
