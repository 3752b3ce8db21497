"""The checker rejects messages that are not what their readers expect, or that no plan moves as the graphs say."""

import re

import pytest
import torch

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import Edge, Message, Messages, build_schedule, check_programs, lower
from fxpar.schedule.message import End


def _message(shape: tuple[int, ...] = (8, 4), dtype: torch.dtype = torch.float32, layout: str = "R") -> Message:
    return Message(shape, dtype, layout)


TO_TWO = [Edge("h", 0, (1, 2))]
ENDS = {
    ("h", 0, False): _message(layout="x,R"),
    ("h", 1, False): _message(),
    ("h", 2, False): _message(layout="R,x"),
    ("h", 1, True): _message(),
    ("h", 2, True): _message(layout="R,x"),
    ("h", 0, True): _message(layout="x,R"),
}


def _rejected(graphs: dict[End, Message], plans: dict[End, Message]) -> list[str]:
    schedule = build_schedule("1f1b", 3, 2)
    plans_by_end = {end: [message] for end, message in plans.items()}
    with pytest.raises(InvalidScheduleError) as caught:
        check_programs(lower(schedule, TO_TWO), schedule, TO_TWO, Messages(graphs, plans_by_end))
    return str(caught.value).splitlines()


def test_messages_that_fit_are_accepted() -> None:
    schedule = build_schedule("1f1b", 3, 2)
    messages = Messages(ENDS, {end: [message] for end, message in ENDS.items()})
    check_programs(lower(schedule, TO_TWO), schedule, TO_TWO, messages)


@pytest.mark.parametrize("wrong", [_message(dtype=torch.bfloat16), _message(shape=(8, 2))])
def test_a_reader_that_expects_another_shape_or_dtype_is_rejected_at_its_wait(wrong: Message) -> None:
    ends = ENDS | {("h", 1, False): wrong}
    lines = _rejected(ends, ends)
    assert lines[0] == (
        f"rank 1, instruction 2: wait h[0] 0->1,2 does not fit: stage 1 expects edge h with {wrong}, "
        "and found it with shape [8, 4], dtype float32, layout x,R from stage 0"
    )
    assert "  --> wait h[0] 0->1,2 <--" in lines


def test_a_plan_that_gives_another_layout_is_rejected_at_the_wait() -> None:
    lines = _rejected(ENDS, ENDS | {("h", 2, False): _message(layout="x,R")})
    assert lines[0] == (
        "rank 2, instruction 2: wait h[0] 0->1,2 is planned with shape [8, 4], dtype float32, layout x,R: "
        "stage 2 receives edge h with shape [8, 4], dtype float32, layout R,x"
    )
    assert "  --> wait h[0] 0->1,2 <--" in lines


def test_a_plan_that_takes_another_dtype_is_rejected_at_the_send() -> None:
    lines = _rejected(ENDS, ENDS | {("h", 0, False): _message(dtype=torch.int64, layout="x,R")})
    assert lines[0] == (
        "rank 0, instruction 5: send h[0] 0->1,2 is planned with shape [8, 4], dtype int64, layout x,R: "
        "stage 0 sends edge h with shape [8, 4], dtype float32, layout x,R"
    )
    assert "  --> send h[0] 0->1,2 <--" in lines


def test_a_gradient_of_another_dtype_is_rejected_where_it_comes_back() -> None:
    ends = ENDS | {("h", 2, True): _message(dtype=torch.float64, layout="R,x")}
    lines = _rejected(ends, ends)
    assert re.search(
        r"^rank 0, .*: wait gradient of h\[0\] 2->0 does not fit: stage 0 expects the gradient of", lines[0]
    )
    assert lines[0].endswith("and found it with shape [8, 4], dtype float64, layout R,x from stage 2")


def test_an_edge_that_no_plan_moves_is_rejected() -> None:
    plans = {end: message for end, message in ENDS.items() if end != ("h", 1, True)}
    lines = _rejected(ENDS, plans)
    assert "send gradient of h[0] 1->0 has no plan that moves it: stage 1 sends the gradient of edge h" in lines[0]
