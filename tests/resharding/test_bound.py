"""The bound below every schedule: exactly the worst set of hosts, found without trying all sets."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, combinations

import pytest
from hypothesis import given

from fxpar.resharding.cases import ITEMSIZE, NINE_CASES, ONE_TO_MANY, Case
from fxpar.resharding.plan import make_plan
from fxpar.resharding.search import Flow, lower_bound
from tests.resharding.random_flows import flows, many_flows


@pytest.mark.parametrize("case", [*NINE_CASES, *ONE_TO_MANY], ids=lambda case: case.name)
def test_the_paper_s_cases_have_the_bounds_of_their_column(case: Case) -> None:
    plan = make_plan(*case.tiles(), ITEMSIZE, case.hosts)
    assert plan.bound_bytes == case.bound * case.num_bytes


def by_definition(given: Sequence[Flow]) -> Fraction:
    """Over all receivers, and all sets of senders."""
    moving = [flow for flow in given if flow.receivers]
    receivers = {host for flow in moving for host in flow.receivers}
    senders = sorted({host for flow in moving for host in flow.senders})
    received = [sum(flow.num_bytes for flow in moving if host in flow.receivers) for host in receivers]
    sets = chain.from_iterable(combinations(senders, size) for size in range(1, len(senders) + 1))
    sent = [
        Fraction(sum(flow.num_bytes for flow in moving if set(flow.senders) <= set(hosts)), len(hosts))
        for hosts in sets
    ]
    return max([Fraction(0), *map(Fraction, received), *sent])


@given(flows())
def test_it_is_the_maximum_over_all_receivers_and_all_sets_of_senders(given: list[Flow]) -> None:
    assert lower_bound(given) == by_definition(given)


def test_it_is_exact_for_many_sets_of_senders() -> None:
    for seed in range(20):
        given = many_flows(60, 9, seed)
        # One receiver each would bound most of these: what is left to look at is sending.
        spread = [Flow(flow.num_bytes, flow.senders, (100 + number,)) for number, flow in enumerate(given)]
        assert lower_bound(spread) == by_definition(spread)


def test_a_bottleneck_may_be_a_set_that_is_nobody_s_senders() -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]
    given = [Flow(4, pair, (10 + number,)) for number, pair in enumerate(pairs)]
    given += [Flow(1, (0, 1, 2, 3), (20,))]
    assert lower_bound(given) == 4
    given += [Flow(4, pairs[0], (30,)), Flow(1, pairs[0], (31,))]
    assert lower_bound(given) == Fraction(17, 3)


def test_what_receivers_send_on_does_not_count() -> None:
    assert lower_bound([Flow(4, (0,), (1, 2)), Flow(4, (1,), (3,))]) == 4


def test_it_is_zero_where_nothing_moves() -> None:
    assert lower_bound([]) == 0
    assert lower_bound([Flow(9, (0,), ()), Flow(0, (0,), (1,))]) == 0


def test_large_sizes_are_exact() -> None:
    given = [Flow(2**44 + 1, (0, 1, 2), (3,)), Flow(2**44, (0, 1, 2), (4,)), Flow(2**44, (0, 1, 2), (5,))]
    given += [Flow(2**43, (0, 1, 2), (6 + number,)) for number in range(4)]
    assert lower_bound(given) == Fraction(5 * 2**44 + 1, 3)
