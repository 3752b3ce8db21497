"""Fused ops on CPUs give what their definitions say, whatever the timing, in memory and between hosts."""

from __future__ import annotations

import pytest

from fxpar.world.launch import run_ranks
from tests.lowering.cpu.run_fused import (
    compare_all,
    compare_in_groups,
    lose_a_rank,
    run_back_to_back,
    run_delayed,
    run_with_everything_there,
    sums_in_order_of_ring,
)

HOSTS = {"one host": "aaaa", "hosts of their own": "abcd", "two and two": "abab", "three and one": "aaba"}


@pytest.mark.parametrize("hosts", HOSTS)
def test_all_forms_agree_with_the_reference_within_rounding_errors(hosts: str) -> None:
    every = 1 if hosts == "one host" else 3
    for wrong in run_ranks(4, compare_all, HOSTS[hosts], every, timeout_s=60):
        assert wrong == []


def test_groups_that_share_ranks_and_groups_of_one_rank_work_side_by_side() -> None:
    for wrong in run_ranks(4, compare_in_groups, timeout_s=60):
        assert wrong == []


@pytest.mark.parametrize("hosts", ["one host", "two and two"])
def test_neither_delays_nor_what_memory_held_before_change_a_bit(hosts: str) -> None:
    for changed in run_ranks(4, run_delayed, HOSTS[hosts], 3, timeout_s=60):
        assert changed == []


def test_gather_matmuls_have_the_bits_that_they_have_when_everything_is_there() -> None:
    for changed in run_ranks(3, run_with_everything_there, timeout_s=60):
        assert changed == []


@pytest.mark.parametrize("hosts", ["one host", "three and one"])
def test_a_hundred_calls_of_varying_sizes_follow_each_other(hosts: str) -> None:
    for wrong in run_ranks(4, run_back_to_back, HOSTS[hosts], 100, timeout_s=60):
        assert wrong == []


def test_terms_are_added_up_around_the_ring() -> None:
    for wrong in run_ranks(4, sums_in_order_of_ring, timeout_s=60):
        assert wrong == []


@pytest.mark.parametrize(
    ("hosts", "ops"),
    [
        ("one host", ["gather", "scatter", "reduce"]),
        ("two and two", ["gather"]),
        ("hosts of their own", ["gather"]),
        ("hosts of their own", ["reduce"]),
    ],
)
def test_a_rank_that_was_killed_is_an_error_on_all_others(hosts: str, ops: list[str]) -> None:
    for errors in run_ranks(4, lose_a_rank, HOSTS[hosts], ops, 2, doomed=[2], timeout_s=60):
        for error in errors:
            assert error.startswith("lost "), error
