"""A rehearsal ends although every action waits for all that its rank has posted and sent before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.schedule import (
    INTERLEAVED,
    SCHEDULE_NAMES,
    Compute,
    Edge,
    PostReceive,
    Program,
    Reduce,
    Routes,
    Schedule,
    Send,
    Transfer,
    Wait,
    build_schedule,
    chain,
    check_programs,
    forward_only,
    lower,
    rehearsal,
)
from tests.schedule.edges import edge_lists

U_SHAPE = (*chain(6), Edge("skip", 0, (3, 5)), Edge("far", 0, (5,)), Edge("mask", 1, (4,), differentiable=False))


def unfinished(programs: Sequence[Program], schedule: Schedule, edges: Sequence[Edge]) -> dict[int, str]:
    """The instruction at which each rank stays for ever, where a rank computes when nothing of its own is under way."""
    routes = Routes(edges, schedule.placement)
    at = [0] * len(programs)
    sent: set[Transfer] = set()
    posted: set[tuple[Transfer, int]] = set()

    def is_over(transfer: Transfer) -> bool:
        targets = routes.target_ranks(transfer)
        return transfer in sent and all((transfer, target) in posted for target in targets)

    def goes_on(rank: int) -> bool:
        match programs[rank].instructions[at[rank]]:
            case Wait(transfer):
                return is_over(transfer)
            case Compute():
                own = {transfer for transfer, target in posted if target == rank}
                own |= {transfer for transfer in sent if routes.source_rank(transfer) == rank}
                return all(is_over(transfer) for transfer in own)
            case Send(transfer):
                sent.add(transfer)
            case PostReceive(transfer):
                posted.add((transfer, rank))
        return True

    def runs_on(rank: int) -> bool:
        start = at[rank]
        while at[rank] < len(programs[rank].instructions) and goes_on(rank):
            at[rank] += 1
        return at[rank] > start

    while sum(runs_on(rank) for rank in range(len(programs))):
        pass
    return {r: str(p.instructions[at[r]]) for r, p in enumerate(programs) if at[r] < len(p.instructions)}


def computed(programs: Sequence[Program]) -> Schedule:
    """The order in which programs compute."""
    rows = [[str(i.action) for i in program.instructions if isinstance(i, Compute)] for program in programs]
    return Schedule.parse("\n".join(" ".join(row) for row in rows))


def check(schedule: Schedule, edges: Sequence[Edge], lookahead: int | None) -> None:
    programs = [rehearsal(program) for program in lower(schedule, edges, lookahead)]
    rehearsed = computed(programs)
    assert rehearsed.num_microbatches == min(2, schedule.num_microbatches)
    assert rehearsed.placement == schedule.placement
    check_programs(programs, rehearsed, edges)
    assert not unfinished(programs, schedule, edges)
    reduced = [i.stage for program in programs for i in program.instructions if isinstance(i, Reduce)]
    assert sorted(reduced) == (list(range(schedule.num_stages)) if schedule.has_backward else [])


@pytest.mark.parametrize(
    ("name", "num_ranks"), [*((name, 6) for name in SCHEDULE_NAMES), (INTERLEAVED, 3), (INTERLEAVED, 2)]
)
def test_rehearsals_of_every_schedule_end(name: str, num_ranks: int) -> None:
    check(build_schedule(name, 6, 12, num_ranks=num_ranks), U_SHAPE, 1)


@given(st.data(), st.sampled_from(SCHEDULE_NAMES), st.integers(2, 5), st.integers(1, 6), st.booleans())
def test_rehearsals_end_with_any_edges(
    data: st.DataObject, name: str, num_stages: int, num_microbatches: int, training: bool
) -> None:
    schedule = build_schedule(name, num_stages, num_microbatches)
    edges = data.draw(edge_lists(num_stages))
    check(schedule if training else forward_only(schedule), edges, data.draw(st.none() | st.integers(0, 4)))


@pytest.mark.parametrize("lookahead", [None, 1])
def test_a_step_itself_would_not_end(lookahead: int | None) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    programs = lower(schedule, chain(2), lookahead)
    assert unfinished(programs, schedule, chain(2)), "else a rehearsal would be of no use"


def test_microbatches_are_rehearsed_one_after_another() -> None:
    first, last = (rehearsal(program) for program in lower(build_schedule("zb-h1", 2, 4), chain(2)))
    assert str(first).splitlines() == [
        "compute 0F0",
        "send out0[0] 0->1",
        "free 0F0",
        "post gradient of out0[0] 1->0",
        "wait gradient of out0[0] 1->0",
        "compute 0I0",
        "free 0I0",
        "compute 0W0",
        "free 0W0",
        "compute 0F1",
        "send out0[1] 0->1",
        "free 0F1",
        "post gradient of out0[1] 1->0",
        "wait gradient of out0[1] 1->0",
        "compute 0I1",
        "free 0I1",
        "compute 0W1",
        "free 0W1",
        "reduce 0",
    ]
    assert str(last).splitlines()[:6] == [
        "post out0[0] 0->1",
        "wait out0[0] 0->1",
        "compute 1F0",
        "free 1F0",
        "compute 1I0",
        "send gradient of out0[0] 1->0",
    ]
