"""The native core's scheduling: any host numbers go in, and what makes no sense does not."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fxpar.core.search import SEARCHES, find_bound, find_slots


@pytest.mark.parametrize("search", SEARCHES)
def test_hosts_may_have_any_numbers(search: str) -> None:
    senders, starts = find_slots([3, 3], [[-5], [10**9]], [[77], [-5]], search=search, seed=0)
    assert (senders, starts) == ([-5, 10**9], [0, 0])


def test_there_may_be_more_hosts_than_bits_in_a_word() -> None:
    pairs = range(100)
    twice = [*pairs, *pairs]
    receivers = [[500 + host] for host in twice]
    senders, starts = find_slots([1] * 200, [[host] for host in twice], receivers, search="best", seed=0)
    assert senders == [*pairs, *pairs]
    assert starts == [0] * 100 + [1] * 100
    assert find_bound([1] * 100, [pairs] * 100, [[500 + host] for host in pairs]) == 1


def test_a_seed_counts_modulo_two_to_the_64() -> None:
    def slots(seed: int) -> tuple[list[int], list[int]]:
        sizes = [number % 7 + 1 for number in range(40)]
        senders = [[number % 3, 3 + number % 2] for number in range(40)]
        return find_slots(sizes, senders, [[10 + number % 5] for number in range(40)], search="greedy", seed=seed)

    assert slots(-1) == slots(2**64 - 1)
    assert slots(-1) != slots(0)


def test_the_bound_is_in_lowest_terms() -> None:
    assert find_bound([6, 6, 2], [[0, 1, 2]] * 3, [[3], [4], [5]]) == Fraction(6)
    assert find_bound([6, 6, 6, 2], [[0, 1, 2]] * 4, [[3], [4], [5], [6]]) == Fraction(20, 3)


@pytest.mark.parametrize(
    ("num_bytes", "senders", "receivers"),
    [([-1], [[0]], [[1]]), ([1], [[]], [[1]]), ([1], [[0]], [[0]]), ([2**50], [[0]], [[1]]), ([2**70], [[0]], [[1]])],
    ids=["negative", "nobody sends", "own receiver", "too much", "not in 64 bits"],
)
def test_what_makes_no_sense_is_refused(
    num_bytes: list[int], senders: list[list[int]], receivers: list[list[int]]
) -> None:
    with pytest.raises(AssertionError, match=r"not flows|do not fit"):
        find_slots(num_bytes, senders, receivers, search="best", seed=0)
    with pytest.raises(AssertionError, match=r"not flows|do not fit"):
        find_bound(num_bytes, senders, receivers)


def test_as_many_senders_as_receivers_as_sizes() -> None:
    with pytest.raises(AssertionError, match="every flow has"):
        find_bound([1, 1], [[0]], [[1]])
