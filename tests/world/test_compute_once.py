"""One rank derives what all would derive alike."""

from __future__ import annotations

import os

import torch.distributed as dist

from fxpar.world.compute_once import compute_once
from fxpar.world.launch import run_ranks


def derived_by(questions: list[str]) -> list[int]:
    """The processes that answered this rank's questions."""
    return [compute_once(question, os.getpid) for question in questions]


def test_all_get_the_answer_of_one() -> None:
    answers = run_ranks(3, derived_by, ["a", "b", "a"])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == answers[0][2]


def ask_in_another_order() -> list[int]:
    """The answers to a and b; of rank 1 also that to a question of its own, and its process."""
    if dist.get_rank() == 0:
        return derived_by(["a", "b"])
    b, own, a = derived_by(["b", "own", "a"])
    return [a, b, own, os.getpid()]


def test_ranks_may_ask_in_any_order_and_more_than_others() -> None:
    first, (a, b, own, process) = run_ranks(2, ask_in_another_order)
    assert first == [a, b]
    assert own == process


def fail_first() -> int | str:
    """The first rank to derive has no answer."""

    def derive() -> int:
        if store.add("tried", 1) == 1:
            raise ValueError("the first fails")
        return os.getpid()

    store = dist.distributed_c10d._get_default_store()
    try:
        return compute_once("a", derive)
    except ValueError as error:
        return str(error)


def test_what_the_first_fails_to_derive_each_derives_for_itself() -> None:
    answers = run_ranks(3, fail_first)
    assert answers.count("the first fails") == 1
    assert len(set(answers)) == 3


def test_who_is_alone_derives() -> None:
    assert compute_once("a", os.getpid) == os.getpid()
