"""A relay has its turn when what comes before it on its host has arrived, but for what keeps the interface busy."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fxpar.hardware.network import Network
from fxpar.resharding.plan import ReshardPlan, make_plan
from fxpar.resharding.tile import Tile
from fxpar.transport.send_order import SendOrder


def plan(hosts: list[int], sizes: list[int], ahead_bytes: int) -> ReshardPlan:
    """Rank after rank of host 0 sends its part to a host of its own."""
    network = Network(bytes_per_us=ahead_bytes / 20_000, chunk_us=1.0)
    held, start = {}, 0
    for rank, size in enumerate(sizes):
        held[rank] = Tile((((start, start + size),),))
        start += size
    needed = {len(sizes) + rank: tile for rank, tile in held.items()}
    return make_plan(held, needed, 1, hosts, network=network)


def in_order(made: ReshardPlan) -> list[int]:
    return [number for number, relay in enumerate(made.relays) if relay.num_hops]


def test_a_long_relay_lets_the_next_begin_shortly_before_its_end() -> None:
    made = plan([0, 0, 1, 2], [1000, 1000], ahead_bytes=100)
    first, second = in_order(made)
    order = SendOrder.of(made)
    assert order.before == {second: first}
    assert order.after(first) == [second]
    assert order.bytes_until_next(first, 1000) == 900
    assert order.bytes_until_next(second, 1000) is None, "nothing comes after it"


def test_of_short_relays_several_are_under_way() -> None:
    made = plan([0] * 6 + [1, 2, 3, 4, 5, 6], [50] * 6, ahead_bytes=100)
    order = in_order(made)
    assert SendOrder.of(made).before == {order[k]: order[k - 3] for k in range(3, 6)}


def test_who_sends_all_to_one_peer_needs_no_turns() -> None:
    parts = (Tile((((0, 8),), ((0, 4),))), Tile((((0, 8),), ((4, 8),))))
    made = make_plan({0: parts[0], 1: parts[1]}, {2: parts[0], 3: parts[1]}, 1, [0, 1, 2, 3])
    assert not SendOrder.of(made).before
    assert not SendOrder.of(made).concern(0)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 300))
def test_nobody_waits_for_who_waits_for_it(sizes: list[int], ahead_bytes: int) -> None:
    made = plan([0] * len(sizes) + list(range(1, len(sizes) + 1)), sizes, ahead_bytes)
    before = SendOrder.of(made).before
    assert all(earlier < later for later, earlier in before.items())
    waits = [before.get(number, -1) for number in in_order(made)]
    assert all(a <= b for a, b in pairwise(waits)), "who comes later waits for no earlier one"
