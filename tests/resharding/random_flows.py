"""Flows for the tests of the search and of its bound."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from fxpar.resharding.search import Flow, Slot


@st.composite
def flows(draw: st.DrawFn, most_flows: int = 12, most_hosts: int = 6) -> list[Flow]:
    """Between few hosts of any numbers, which may both send and receive; some flows are equal, empty, or local."""
    hosts = draw(st.lists(st.integers(0, 200), min_size=2, max_size=most_hosts, unique=True))
    found = []
    for _ in range(draw(st.integers(0, most_flows))):
        order = draw(st.permutations(hosts))
        first_receiver = draw(st.integers(1, len(hosts)))
        last_receiver = draw(st.integers(first_receiver, len(hosts)))
        flow = Flow(draw(st.integers(0, 5)), tuple(order[:first_receiver]), tuple(order[first_receiver:last_receiver]))
        found += [flow] * draw(st.sampled_from([1, 1, 2]))
    return found


def many_flows(count: int, num_hosts: int, seed: int = 0, most_bytes: int = 100_000) -> list[Flow]:
    """From each of up to three of as many hosts to up to two of as many others; the sizes are rarely equal."""
    numbers = random.Random(seed)
    found = []
    for _ in range(count):
        senders = numbers.sample(range(num_hosts), numbers.randint(1, min(3, num_hosts)))
        receivers = numbers.sample(range(num_hosts, 2 * num_hosts), numbers.randint(1, min(2, num_hosts)))
        found.append(Flow(numbers.randint(1, most_bytes), tuple(senders), tuple(receivers)))
    return found


def all_to_all(num_hosts: int, num_bytes: int = 1) -> list[Flow]:
    """One flow from each host to each of as many others."""
    return [Flow(num_bytes, (host,), (num_hosts + other,)) for host in range(num_hosts) for other in range(num_hosts)]


def interfaces(flow: Flow, slot: Slot) -> list[tuple[str, int]]:
    """What a flow occupies while it runs."""
    sending = [("sends", host) for host in (slot.sender, *flow.receivers[:-1])]
    return sending + [("receives", host) for host in flow.receivers]
