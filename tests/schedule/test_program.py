"""Lowering puts each action's communication around it: early receives, late waits, immediate sends."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.schedule import (
    SCHEDULE_NAMES,
    Complete,
    Compute,
    Edge,
    Free,
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
    forward_only,
    lower,
    peak_in_flight,
)

U_SHAPE = (*chain(4), Edge("skip", 0, (1, 3)), Edge("mask", 0, (2,), differentiable=False))


def test_the_programs_of_two_stages_and_two_microbatches() -> None:
    first, last = lower(build_schedule("1f1b", 2, 2), [Edge("h", 0, (1,))], lookahead=1)
    assert str(first).splitlines() == [
        "post gradient of h[0] 1->0",
        "compute 0F0",
        "send h[0] 0->1",
        "free 0F0",
        "compute 0F1",
        "send h[1] 0->1",
        "free 0F1",
        "wait gradient of h[0] 1->0",
        "complete h[0] 0->1",
        "post gradient of h[1] 1->0",
        "compute 0B0",
        "free 0B0",
        "wait gradient of h[1] 1->0",
        "complete h[1] 0->1",
        "compute 0B1",
        "free 0B1",
        "reduce 0",
    ]
    assert str(last).splitlines() == [
        "post h[0] 0->1",
        "wait h[0] 0->1",
        "post h[1] 0->1",
        "compute 1F0",
        "free 1F0",
        "compute 1B0",
        "send gradient of h[0] 1->0",
        "free 1B0",
        "wait h[1] 0->1",
        "compute 1F1",
        "free 1F1",
        "compute 1B1",
        "send gradient of h[1] 1->0",
        "free 1B1",
        "reduce 1",
    ]


def test_a_multicast_is_sent_once_and_received_by_each_target_and_its_gradients_return_one_by_one() -> None:
    first, second, last = lower(build_schedule("1f1b", 3, 1), [Edge("h", 0, (1, 2))])
    assert [str(i) for i in first.instructions if isinstance(i, Send | Wait)] == [
        "send h[0] 0->1,2",
        "wait gradient of h[0] 1->0",
        "wait gradient of h[0] 2->0",
    ]
    for reader, program in enumerate((second, last), start=1):
        assert str(program).splitlines() == [
            "post h[0] 0->1,2",
            "wait h[0] 0->1,2",
            f"compute {reader}F0",
            f"free {reader}F0",
            f"compute {reader}B0",
            f"send gradient of h[0] {reader}->0",
            f"free {reader}B0",
            f"reduce {reader}",
        ]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_computes_follow_the_schedule_each_between_its_waits_and_its_sends(name: str) -> None:
    schedule, routes = build_schedule(name, 4, 8), Routes(U_SHAPE)
    for program in lower(schedule, U_SHAPE):
        groups = [str(i) for i in program.instructions if not isinstance(i, PostReceive | Complete)]
        expected: list[Wait | Compute | Send | Free | Reduce] = []
        for action in schedule.ranks[program.rank]:
            expected += [Wait(transfer) for transfer in routes.received(action)]
            expected += [Compute(action), *(Send(transfer) for transfer in routes.sent(action)), Free(action)]
        expected.append(Reduce(program.rank))
        assert groups == [str(i) for i in expected]


def _most_outstanding(program: Program) -> int:
    outstanding: Counter[tuple[str, int]] = Counter()
    most = 0
    for instruction in program.instructions:
        if isinstance(instruction, PostReceive | Wait):
            stream = instruction.transfer.edge, instruction.transfer.source
            outstanding[stream] += 1 if isinstance(instruction, PostReceive) else -1
            most = max(most, outstanding[stream])
    return most


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 16), st.integers(1, 5))
def test_receives_are_posted_ahead_up_to_the_lookahead(name: str, num_microbatches: int, lookahead: int) -> None:
    for program in lower(build_schedule(name, 4, num_microbatches), U_SHAPE, lookahead):
        assert _most_outstanding(program) == min(lookahead, num_microbatches)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_by_default_buffers_are_bounded_by_what_is_in_flight(name: str) -> None:
    schedule = build_schedule(name, 4, 64)
    peaks = peak_in_flight(schedule)
    found = [_most_outstanding(program) for program in lower(schedule, U_SHAPE)]
    assert found == [min(64, peak + 1) for peak in peaks]


def test_evaluation_posts_two_receives_ahead_however_many_microbatches() -> None:
    programs = lower(forward_only(build_schedule("gpipe", 4, 64)), U_SHAPE)
    assert [_most_outstanding(program) for program in programs] == [0, 2, 2, 2]
    assert not any(
        isinstance(i, Send | PostReceive) and i.transfer.is_backward for p in programs for i in p.instructions
    )


def test_without_lookahead_a_receive_is_posted_right_before_its_wait() -> None:
    for program in lower(build_schedule("1f1b", 4, 8), chain(4), lookahead=0):
        instructions = program.instructions
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Wait):
                assert instructions[position - 1] == PostReceive(instruction.transfer)


@given(st.permutations(range(4)), st.permutations(range(4)), st.integers(0, 4))
def test_receives_are_posted_in_the_senders_order_whatever_the_receivers(
    sent: list[int], used: list[int], lookahead: int
) -> None:
    first = " ".join(f"0F{microbatch}" for microbatch in sent)
    last = " ".join(f"1F{microbatch}" for microbatch in used)
    _, receiver = lower(Schedule.parse(f"{first}\n{last}"), chain(2), lookahead)
    posted = [i.transfer for i in receiver.instructions if isinstance(i, PostReceive)]
    assert posted == [Transfer("out0", microbatch, 0, (1,)) for microbatch in sent]


def test_a_single_stage_exchanges_nothing() -> None:
    (program,) = lower(build_schedule("1f1b", 1, 1), [])
    assert str(program) == "compute 0F0\nfree 0F0\ncompute 0B0\nfree 0B0\nreduce 0"
