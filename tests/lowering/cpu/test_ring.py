"""Who sends, holds and multiplies what, in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxpar.lowering.cpu.ring import after, held, holder, receivers

hosts_of_ranks = st.lists(st.integers(0, 3), min_size=1, max_size=9)


def test_the_ring_begins_behind_the_own_rank() -> None:
    assert after(5, 8) == [6, 7, 0, 1, 2, 3, 4]
    assert after(0, 1) == []


@given(hosts_of_ranks)
def test_every_piece_crosses_to_each_other_host_once_and_is_held_by_one_rank_there(hosts: list[int]) -> None:
    for part in range(len(hosts)):
        for host in set(hosts):
            holders = [rank for rank, its in enumerate(hosts) if its == host and part in held(hosts, rank)]
            assert holders == [holder(hosts, part, host)]
        elsewhere = {holder(hosts, part, host) for host in set(hosts) - {hosts[part]}}
        assert set(receivers(hosts, part)) == elsewhere and len(receivers(hosts, part)) == len(elsewhere)


@given(hosts_of_ranks)
def test_the_ranks_of_a_host_share_what_the_host_receives_evenly(hosts: list[int]) -> None:
    for host in set(hosts):
        numbers = [len(held(hosts, rank)) for rank, its in enumerate(hosts) if its == host]
        assert max(numbers) - min(numbers) <= 1


def test_ranks_send_first_to_the_one_that_multiplies_their_piece_first() -> None:
    hosts = [0, 1, 2, 3]
    assert receivers(hosts, 1) == [0, 3, 2]
    assert held(hosts, 0) == [0, 1, 2, 3]
