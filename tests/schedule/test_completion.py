"""What was sent is completed as soon as this rank can know that all receivers have it."""

import pytest

from fxpar.schedule import (
    INTERLEAVED,
    SCHEDULE_NAMES,
    Complete,
    Edge,
    Program,
    Schedule,
    Send,
    build_schedule,
    chain,
    forward_only,
    lower,
)


def _lines(program: Program) -> list[str]:
    return [str(i) for i in program.instructions if not str(i).startswith(("post", "free", "reduce"))]


def test_a_value_is_complete_once_its_gradient_is_back_and_a_gradient_once_a_later_value_came() -> None:
    first, last = lower(build_schedule("1f1b", 2, 3), chain(2))
    assert _lines(first) == [
        "compute 0F0",
        "send out0[0] 0->1",
        "compute 0F1",
        "send out0[1] 0->1",
        "wait gradient of out0[0] 1->0",
        "complete out0[0] 0->1",
        "compute 0B0",
        "compute 0F2",
        "send out0[2] 0->1",
        "wait gradient of out0[1] 1->0",
        "complete out0[1] 0->1",
        "compute 0B1",
        "wait gradient of out0[2] 1->0",
        "complete out0[2] 0->1",
        "compute 0B2",
    ]
    assert _lines(last) == [
        "wait out0[0] 0->1",
        "compute 1F0",
        "compute 1B0",
        "send gradient of out0[0] 1->0",
        "wait out0[1] 0->1",
        "compute 1F1",
        "compute 1B1",
        "send gradient of out0[1] 1->0",
        "wait out0[2] 0->1",  # stage 0 sent it after it had waited for the first gradient
        "complete gradient of out0[0] 1->0",
        "compute 1F2",
        "compute 1B2",
        "send gradient of out0[2] 1->0",
    ]


def test_what_a_third_rank_knows_is_proof_too() -> None:
    edges = [Edge("mask", 0, (2,), differentiable=False), Edge("h", 0, (1,)), Edge("out", 1, (2,))]
    first, *_ = lower(build_schedule("1f1b", 3, 1), edges)
    assert _lines(first) == [
        "compute 0F0",
        "send h[0] 0->1",
        "send mask[0] 0->2",
        "wait gradient of h[0] 1->0",  # stage 1 has stage 2's gradient, and stage 2 had the mask
        "complete h[0] 0->1",
        "complete mask[0] 0->2",
        "compute 0B0",
    ]


def test_a_multicast_is_complete_when_all_its_targets_have_it() -> None:
    first, *_ = lower(build_schedule("1f1b", 3, 1), [Edge("h", 0, (1, 2))])
    assert _lines(first)[2:] == [
        "wait gradient of h[0] 1->0",
        "wait gradient of h[0] 2->0",
        "complete h[0] 0->1,2",
        "compute 0B0",
    ]


def test_what_stays_on_a_rank_is_complete_once_it_was_waited_for() -> None:
    (program,) = lower(build_schedule(INTERLEAVED, 2, 1, num_ranks=1), chain(2))
    assert _lines(program) == [
        "compute 0F0",
        "send out0[0] 0->1",
        "wait out0[0] 0->1",
        "complete out0[0] 0->1",
        "compute 1F0",
        "compute 1B0",
        "send gradient of out0[0] 1->0",
        "wait gradient of out0[0] 1->0",
        "complete gradient of out0[0] 1->0",
        "compute 0B0",
    ]


@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name != "gpipe"])
def test_what_is_not_complete_when_a_step_ends_does_not_grow_with_the_microbatches(name: str) -> None:
    def left(num_microbatches: int) -> list[int]:
        programs = lower(build_schedule(name, 4, num_microbatches), [*chain(4), Edge("skip", 0, (1, 3))])
        sent = [sum(isinstance(i, Send) for i in program.instructions) for program in programs]
        completed = [sum(isinstance(i, Complete) for i in program.instructions) for program in programs]
        return [number - known for number, known in zip(sent, completed, strict=True)]

    assert left(32) == left(64)
    assert left(64)[0] == 0
    assert max(left(64)) <= 2 * 7  # the gradients, of one edge or two, of what is in flight at most


def test_every_value_is_complete_before_the_step_ends() -> None:
    for name in SCHEDULE_NAMES:
        for program in lower(build_schedule(name, 4, 8), chain(4)):
            values = {i.transfer for i in program.instructions if isinstance(i, Send) and not i.transfer.is_backward}
            completed = {i.transfer for i in program.instructions if isinstance(i, Complete)}
            assert values <= completed, name


def test_nothing_follows_the_gradients_of_gpipe_that_could_prove_them() -> None:
    last = lower(build_schedule("gpipe", 2, 8), chain(2))[1]
    assert not any(isinstance(i, Complete) for i in last.instructions)


def test_in_evaluation_nothing_comes_back_that_could_prove_anything() -> None:
    programs = lower(forward_only(build_schedule("1f1b", 3, 4)), chain(3))
    assert not any(isinstance(i, Complete) for program in programs for i in program.instructions)


def test_ranks_that_wait_for_each_other_keep_their_programs() -> None:
    schedule = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    for program in lower(schedule, chain(2)):
        computed = [str(i) for i in program.instructions if str(i).startswith("compute")]
        assert computed == [f"compute {action}" for action in schedule.ranks[program.rank]]
