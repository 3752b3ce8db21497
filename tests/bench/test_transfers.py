"""Timed transfers are checked, of the cases that they are said to be of, and as slow as their last rank."""

from __future__ import annotations

import pytest
import torch

from fxpar.bench.measure.interleaved import Sample
from fxpar.bench.reshard.problems import ReshardProblem, nine_cases, one_to_many
from fxpar.bench.reshard.transfers import TimedTransfer, measured, numbered
from fxpar.hardware.network import LOOPBACK
from fxpar.resharding.cases import ITEMSIZE, NINE_CASES, ONE_TO_MANY
from fxpar.resharding.plan import make_plan
from fxpar.resharding.tile import Tile
from fxpar.world.launch import RankFailedError, run_ranks
from tests.bench.time_on_ranks import send_wrong_values
from tests.resharding.pieces import taken

NUM_ELEMENTS = 6_250_000
SOME, ALL = Tile((((0, 2),), ((1, 3), (5, 6)))), Tile((((0, 4),), ((0, 7),)))


def two_ranks(repeats: int = 1) -> TimedTransfer:
    """From rank 0 to rank 1 of one host."""
    ends = {0: ALL}, {1: SOME}
    return TimedTransfer("two ranks", (4, 7), *ends, make_plan(*ends, ITEMSIZE, (0, 0)), repeats)


def test_numbered_pieces_are_pieces_of_what_counts_its_elements() -> None:
    whole = torch.arange(4 * 7, dtype=torch.int32).view(4, 7)
    assert torch.equal(numbered((4, 7), ALL), whole)
    assert torch.equal(numbered((4, 7), SOME), taken(whole, SOME))


def test_wrong_values_are_no_result() -> None:
    with pytest.raises(RankFailedError, match="two ranks by broadcast: rank 1 has wrong values"):
        run_ranks(2, send_wrong_values, [two_ranks()], timeout_s=60)


def test_each_repeat_takes_as_long_as_its_last_rank() -> None:
    by_rank = [[[Sample(seconds, others=0.0) for seconds in rank]] for rank in ((1.0, 5.0, 2.0), (3.0, 1.0, 2.5))]
    (found,) = measured([two_ranks(repeats=3)], by_rank)
    assert list(found.seconds) == [3.0, 5.0, 2.5]
    assert found.times() == {"repeats": 3, "median_s": 3.0, "least_s": 2.5, "most_s": 5.0}


def relative_bound(problem: ReshardProblem) -> float:
    """The bound of broadcast's plan over the bytes of the tensor."""
    bound = problem.plan("broadcast", LOOPBACK).bound_bytes
    return float(bound / (torch.Size(problem.shape).numel() * ITEMSIZE))


def test_small_tensors_have_the_bounds_of_large_ones() -> None:
    assert [relative_bound(problem) for problem in nine_cases(NUM_ELEMENTS)] == [float(c.bound) for c in NINE_CASES]
    assert [relative_bound(problem) for problem in one_to_many(NUM_ELEMENTS)] == [1.0] * len(ONE_TO_MANY)


def test_small_tensors_have_about_the_size_that_was_asked_for() -> None:
    for problem in (*nine_cases(NUM_ELEMENTS), *one_to_many(NUM_ELEMENTS)):
        assert torch.Size(problem.shape).numel() == pytest.approx(NUM_ELEMENTS, rel=0.05), problem.name


def test_one_device_sends_to_each_mesh_on_the_same_hosts() -> None:
    problems = one_to_many(80)
    assert {problem.hosts for problem in problems} == {(0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4)}
    needing = {problem.name: tuple(problem.destination) for problem in problems}
    assert needing["to 1x3"] == (1, 2, 3)
    assert needing["to 3x2"] == (1, 2, 5, 6, 7, 8)
