"""Who sends, holds and multiplies what, in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxpar.lowering.cpu.ring import adder_before, after, far_first, held, holder, near_first, receiver, sender

hosts_of_ranks = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(
    lambda names: tuple(list(dict.fromkeys(names)).index(name) for name in names)
)


def test_the_ring_begins_behind_the_own_rank() -> None:
    assert after(5, 8) == [6, 7, 0, 1, 2, 3, 4]
    assert after(0, 1) == []


@given(hosts_of_ranks)
def test_every_piece_goes_once_to_every_host_and_is_held_by_one_rank_there(hosts: tuple[int, ...]) -> None:
    for part in range(len(hosts)):
        holders = {host: holder(hosts, part, host) for host in hosts}
        assert {rank for rank in range(len(hosts)) if part in held(hosts, rank)} == set(holders.values())
        rank, visited = part, [part]
        while (following := receiver(hosts, part, rank)) is not None:
            assert sender(hosts, part, following) == rank
            visited.append(following)
            rank = following
        assert visited[0] == part and sorted(visited) == sorted(holders.values())


@given(hosts_of_ranks)
def test_two_ranks_expect_their_pieces_from_a_third_in_the_order_in_which_it_gets_them(hosts: tuple[int, ...]) -> None:
    for rank in range(len(hosts)):
        _, *parts = held(hosts, rank)
        for source in {sender(hosts, part, rank) for part in parts}:
            passed_on = [part for part in held(hosts, source) if receiver(hosts, part, source) == rank]
            assert [part for part in parts if sender(hosts, part, rank) == source] == passed_on


@given(hosts_of_ranks)
def test_the_ranks_of_a_host_share_what_the_host_receives_evenly(hosts: tuple[int, ...]) -> None:
    for host in set(hosts):
        numbers = [len(held(hosts, rank)) for rank, its in enumerate(hosts) if its == host]
        assert max(numbers) - min(numbers) <= 1


def test_the_own_host_comes_first_where_pieces_are_read_and_last_where_they_are_computed() -> None:
    hosts = [0, 1, 0, 1, 2]
    assert near_first(hosts, 0) == [2, 1, 3, 4]
    assert far_first(hosts, 0) == [1, 3, 4, 2]
    assert near_first([0] * 8, 5) == after(5, 8)
    assert near_first(list(range(8)), 5) == after(5, 8)


@given(hosts_of_ranks)
def test_a_sum_goes_around_the_ranks_of_its_owners_host_and_comes_to_the_owner_last(hosts: tuple[int, ...]) -> None:
    for owner in range(len(hosts)):
        here = [rank for rank, host in enumerate(hosts) if host == hosts[owner]]
        chain = [owner]
        while (before := adder_before(hosts, owner, chain[-1])) is not None:
            chain.append(before)
        assert sorted(chain) == here


def test_each_rank_waits_for_one_that_is_a_piece_ahead_of_it() -> None:
    hosts = (0,) * 4
    for rank in range(4):
        order = [*far_first(hosts, rank), rank]
        assert [adder_before(hosts, owner, rank) for owner in order] == [None, *[(rank + 1) % 4] * 3]
        assert order[1:] == [*far_first(hosts, (rank + 1) % 4), (rank + 1) % 4][:3]
