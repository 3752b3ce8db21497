"""Whatever is done to programs and schedules: what the checker accepts runs to its end under any timing."""

from collections.abc import Sequence
from typing import TypeVar

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
)
from tests.schedule.any_timing import TimedRun

T = TypeVar("T")
EDGES = [*chain(4), Edge("skip", 0, (2, 3)), Edge("mask", 1, (3,), differentiable=False)]


def _edges(num_stages: int) -> list[Edge]:
    """Those of `EDGES` within so many stages."""
    within = [(edge, tuple(t for t in edge.targets if t < num_stages)) for edge in EDGES]
    return [Edge(edge.name, edge.source, targets, edge.differentiable) for edge, targets in within if targets]


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
def mutated_programs(draw: st.DrawFn) -> tuple[Schedule, list[Program]]:
    schedule = draw(schedules())
    programs = list(lower(schedule, _edges(schedule.num_stages), draw(st.sampled_from([None, 0, 1]))))
    for _ in range(draw(st.integers(1, 2))):
        rank = draw(st.integers(0, len(programs) - 1))
        programs[rank] = Program(rank, tuple(_mutated(draw, programs[rank].instructions)))
    return schedule, programs


@settings(max_examples=400)
@given(mutated_programs(), st.integers(0, 1000))
def test_a_program_that_is_accepted_runs_under_any_timing(given: tuple[Schedule, list[Program]], seed: int) -> None:
    schedule, programs = given
    edges = _edges(schedule.num_stages)
    try:
        check_programs(programs, schedule, edges)
    except InvalidScheduleError:
        return
    for more in range(3):
        assert TimedRun(programs, schedule, edges, seed + more).run()


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
    edges = _edges(schedule.num_stages)
    assert TimedRun(lower(schedule, edges, lookahead), schedule, edges, seed).run()
