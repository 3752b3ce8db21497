"""Ranks that would wait for each other for ever fail: collectives in different places, an error on one rank alone."""

from __future__ import annotations

from fxpar.world.launch import run_ranks
from tests.support.agree import compare, fail_on

REDUCE, GATHER = "all_reduce over x", "all_gather over z"


def test_the_first_collective_that_differs_is_named_on_all_ranks() -> None:
    first_stage = {"stage 0, forward": [REDUCE]}
    found = run_ranks(
        3,
        compare,
        [first_stage, {"stage 1, forward": [REDUCE, GATHER]}, {"stage 1, forward": [REDUCE, REDUCE, GATHER]}],
    )
    assert len(set(found)) == 1
    assert found[0].startswith("stage 1, forward: ")
    assert "collective 1 is all_gather over z on rank 1, and all_reduce over x on rank 2" in found[0]


def test_a_collective_that_a_rank_lacks_is_named() -> None:
    found = run_ranks(2, compare, [{"stage 0, backward": [REDUCE]}, {"stage 0, backward": []}])
    assert "collective 0 is all_reduce over x on rank 0, and none on rank 1" in found[0]


def test_ranks_of_different_stages_may_communicate_differently() -> None:
    assert run_ranks(2, compare, [{"stage 0, forward": [REDUCE]}, {"stage 1, forward": [GATHER]}]) == ["", ""]


def test_what_fails_on_one_rank_is_an_error_on_all() -> None:
    told = "cannot count to three, since rank 1 failed: ValueError: what comes after two?"
    assert run_ranks(3, fail_on, 1) == [told, "what comes after two?", told]
    assert run_ranks(2, fail_on, None) == ["", ""]
