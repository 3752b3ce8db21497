"""The checker rejects what is broken at the first wrong instruction, and shows it among its neighbours."""

from collections.abc import Callable
from typing import TypeAlias

import pytest

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import (
    SCHEDULE_NAMES,
    Complete,
    Edge,
    Instruction,
    PostReceive,
    Program,
    Reduce,
    Schedule,
    Transfer,
    build_schedule,
    chain,
    check_programs,
    lower,
)

H = Edge("h", 0, (1,))

Edit: TypeAlias = Callable[[list[Instruction]], list[Instruction]]


def _without(*printed: str) -> Edit:
    return lambda program: [i for i in program if str(i) not in printed]


def _doubled(printed: str) -> Edit:
    return lambda program: [i for i in program for _ in range(2 if str(i) == printed else 1)]


def _swapped(first: str, second: str) -> Edit:
    def edit(program: list[Instruction]) -> list[Instruction]:
        at = {str(i): i for i in program}
        swap = {first: at[second], second: at[first]}
        return [swap.get(str(i), i) for i in program]

    return edit


BROKEN: dict[str, tuple[int, Edit, str]] = {  # the rank whose program is edited, how, and what the error says
    "a send is missing": (
        0,
        _without("send h[1] 0->1"),
        "rank 1, instruction 1: post h[1] 0->1 has no matching send",
    ),
    "a receive is missing": (
        1,
        _without("post h[1] 0->1"),
        "rank 0, instruction 6: send h[1] 0->1 has no matching receive",
    ),
    "a send is doubled": (
        0,
        _doubled("send h[0] 0->1"),
        "rank 1, instruction 1: post h[1] 0->1 would take what rank 0 sends as h[0] 0->1",
    ),
    "a receive is doubled": (
        0,
        _doubled("post gradient of h[1] 1->0"),
        "rank 0, instruction 2: post gradient of h[1] 1->0 has no matching send",
    ),
    "receives are in another order than sends": (
        1,
        _swapped("post h[0] 0->1", "post h[1] 0->1"),
        "rank 1, instruction 0: post h[1] 0->1 would take what rank 0 sends as h[0] 0->1",
    ),
    "a receive is posted after its wait": (
        1,
        _swapped("post h[1] 0->1", "wait h[1] 0->1"),
        "rank 1, instruction 1: wait h[1] 0->1 has no receive posted",
    ),
    "a wait is missing": (
        0,
        _without("wait gradient of h[0] 1->0"),
        "rank 0, instruction 8: complete h[0] 0->1 is not proved: rank 1 may not have waited for it yet",
    ),
    "a wait and what it proves are missing": (
        0,
        _without("wait gradient of h[0] 1->0", "complete h[0] 0->1"),
        "rank 0, instruction 8: compute 0B0 needs gradient of h[0] 1->0, for which nothing waited",
    ),
    "a wait is doubled": (
        0,
        _doubled("wait gradient of h[0] 1->0"),
        "rank 0, instruction 9: wait gradient of h[0] 1->0 has no receive posted",
    ),
    "a send is before its compute": (
        0,
        _swapped("compute 0F0", "send h[0] 0->1"),
        "rank 0, instruction 2: send h[0] 0->1 has nothing to send",
    ),
    "a forward is missing": (
        0,
        _without("compute 0F1"),
        "rank 0, instruction 5: send h[1] 0->1 has nothing to send",
    ),
    "a forward is doubled": (
        0,
        _doubled("compute 0F0"),
        "rank 0, instruction 3: compute 0F0 is out of order: the schedule has 0F1 here",
    ),
    "a backward is before its forward": (
        0,
        _swapped("compute 0F0", "compute 0B0"),
        "rank 0, instruction 2: compute 0B0 is out of order: the schedule has 0F0 here",
    ),
    "a backward is missing": (
        0,
        _without("compute 0B0"),
        "rank 0, instruction 10: free 0B0 has nothing to free",
    ),
    "a backward is doubled": (
        0,
        _doubled("compute 0B1"),
        "rank 0, instruction 15: compute 0B1 is out of order: the schedule has the end here",
    ),
    "the last backward is missing": (
        0,
        _without("compute 0B1", "free 0B1", "reduce 0"),
        "rank 0 never computes 0B1",
    ),
    "a free is doubled": (
        1,
        _doubled("free 1F0"),
        "rank 1, instruction 5: free 1F0 has nothing to free",
    ),
    "a free is before its send": (
        0,
        _swapped("free 0F0", "send h[0] 0->1"),
        "rank 0, instruction 3: free 0F0 comes before send h[0] 0->1",
    ),
    "a free is missing": (
        1,
        _without("free 1F1"),
        "rank 1 never frees 1F1",
    ),
    "a completion is before its proof": (
        0,
        _swapped("wait gradient of h[0] 1->0", "complete h[0] 0->1"),
        "rank 0, instruction 8: complete h[0] 0->1 is not proved: rank 1 may not have waited for it yet",
    ),
    "a completion is before its send": (
        0,
        _swapped("send h[1] 0->1", "complete h[1] 0->1"),
        "rank 0, instruction 6: complete h[1] 0->1 has nothing to complete",
    ),
    "a completion is doubled": (
        0,
        _doubled("complete h[0] 0->1"),
        "rank 0, instruction 10: complete h[0] 0->1 has nothing to complete",
    ),
    "a reduction is before the last backward": (
        0,
        _swapped("compute 0B1", "reduce 0"),
        "rank 0, instruction 14: reduce 0 comes before the last action of the stage",
    ),
    "a reduction is missing": (
        1,
        _without("reduce 1"),
        "rank 1 never reduces stage 1",
    ),
    "a reduction is doubled": (
        1,
        _doubled("reduce 1"),
        "rank 1, instruction 15: reduce 1 has nothing to reduce",
    ),
    "a reduction is of another rank's stage": (
        1,
        lambda program: [*program, Reduce(0)],
        "rank 1, instruction 15: reduce 0 has nothing to reduce",
    ),
}


@pytest.mark.parametrize(("rank", "edit", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_program_is_rejected_at_its_first_wrong_instruction(rank: int, edit: Edit, problem: str) -> None:
    schedule = build_schedule("1f1b", 2, 2)
    programs = list(lower(schedule, [H]))
    programs[rank] = Program(rank, tuple(edit(list(programs[rank].instructions))))
    with pytest.raises(InvalidScheduleError) as caught:
        check_programs(programs, schedule, [H])
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_no_instruction_but_completions_can_be_left_out(name: str) -> None:
    schedule, edges = build_schedule(name, 3, 3), [*chain(3), Edge("skip", 0, (1, 2))]
    programs = lower(schedule, edges)
    for rank, program in enumerate(programs):
        for position, left_out in enumerate(program.instructions):
            if isinstance(left_out, Complete):
                continue  # it only frees memory earlier
            rest = program.instructions[:position] + program.instructions[position + 1 :]
            with pytest.raises(InvalidScheduleError):
                check_programs([*programs[:rank], Program(rank, rest), *programs[rank + 1 :]], schedule, edges)
                pytest.fail(f"rank {rank} needs no instruction {position}: {left_out}")


def test_a_message_of_other_ranks_is_rejected() -> None:
    schedule = build_schedule("1f1b", 3, 1)
    first, middle, last = lower(schedule, chain(3))
    broken = Program(2, (PostReceive(Transfer("out0", 0, 0, (1,))), *last.instructions))
    with pytest.raises(InvalidScheduleError, match=r"rank 2, instruction 0: post out0\[0\] 0->1 is not this rank's"):
        check_programs([first, middle, broken], schedule, chain(3))


def test_the_first_wrong_instruction_is_marked_among_its_neighbours() -> None:
    schedule = build_schedule("1f1b", 1, 3)
    (program,) = lower(schedule, [])
    with pytest.raises(InvalidScheduleError) as caught:
        check_programs([Program(0, program.instructions[:4] + program.instructions[5:])], schedule, [])
    assert str(caught.value).splitlines() == [
        "rank 0, instruction 4: free 0F1 has nothing to free: it was not computed, or it is freed already",
        "  ...",
        "  free 0F0",
        "  compute 0B0",
        "  free 0B0",
        "  --> free 0F1 <--",
        "  compute 0B1",
        "  free 0B1",
        "  compute 0F2",
        "  ...",
    ]


def test_a_target_that_never_receives_a_multicast_is_named() -> None:
    schedule, edges = build_schedule("1f1b", 3, 1), [Edge("h", 0, (1, 2))]
    first, second, last = lower(schedule, edges)
    deaf = Program(1, tuple(i for i in second.instructions if not isinstance(i, PostReceive)))
    with pytest.raises(InvalidScheduleError, match=r"rank 0, .*: send h\[0\] 0->1,2 has no matching receive"):
        check_programs([first, deaf, last], schedule, edges)


def test_the_end_is_marked_where_something_is_left_undone() -> None:
    schedule = build_schedule("1f1b", 1, 1)
    (program,) = lower(schedule, [])
    with pytest.raises(InvalidScheduleError) as caught:
        check_programs([Program(0, program.instructions[:-1])], schedule, [])
    assert str(caught.value).splitlines() == [
        "rank 0 never reduces stage 0",
        "  ...",
        "  free 0F0",
        "  compute 0B0",
        "  free 0B0",
        "  --> the end <--",
    ]


def test_stages_of_one_rank_in_the_wrong_order_are_rejected() -> None:
    schedule = Schedule.parse("1F0 0F0 1B0 0B0")
    with pytest.raises(InvalidScheduleError, match=r"0: wait h\[0\] 0->1 comes before what the same rank makes"):
        check_programs(lower(schedule, [H]), schedule, [H])
