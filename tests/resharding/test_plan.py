"""Plans deliver every element once, never overload an interface, and are the same wherever they are made."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import UnknownAlgorithmError, UnknownStrategyError
from fxpar.hardware.network import MAX_CHUNKS, Network
from fxpar.resharding.plan import Relay, ReshardPlan, make_plan
from fxpar.resharding.search import ALGORITHMS
from fxpar.resharding.strategies import SIGNAL, STRATEGIES
from fxpar.resharding.tile import Tile
from tests.resharding.layouts import Case, cases

NUM_RANKS = 24


@st.composite
def plans(draw: st.DrawFn) -> tuple[Case, ReshardPlan]:
    """A random resharding of ranks on random hosts, by any strategy and algorithm."""
    case = draw(cases())
    per_host = draw(st.integers(1, 8))
    hosts = [rank // per_host for rank in range(NUM_RANKS)]
    strategy, algorithm = draw(st.sampled_from(list(STRATEGIES))), draw(st.sampled_from(ALGORITHMS))
    network = Network(bytes_per_us=1e-3, chunk_us=draw(st.sampled_from([1.0, 1e5])))
    held, needed = case.tiles()
    waves = {rank: draw(st.integers(0, 2)) for rank in needed} if draw(st.booleans()) else None
    plan = make_plan(held, needed, 1, hosts, strategy=strategy, algorithm=algorithm, network=network, waves=waves)
    return case, plan


@given(plans())
def test_every_receiver_gets_each_element_of_its_tasks_once(made: tuple[Case, ReshardPlan]) -> None:
    _, plan = made
    arrived: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, task in enumerate(plan.tasks):
        for rank in task.receivers:
            arrived[number, rank] = [(0, task.num_elements)] if rank in task.senders else []
    for relay in plan.relays:
        assert relay.path[0] in plan.tasks[relay.task].senders
        for rank in _takers(relay):
            arrived[relay.task, rank].append((relay.start, relay.stop))
    for (number, rank), parts in arrived.items():
        parts.sort()
        ends = [(0, 0), *parts, (plan.tasks[number].num_elements,) * 2]
        assert all(before[1] == after[0] for before, after in pairwise(ends)), f"task {number}, rank {rank}: {parts}"


def _takers(relay: Relay) -> list[int]:
    return [*relay.path[1:], *(rank for group in relay.readers for rank in group)]


@given(plans())
def test_only_chains_cross_between_hosts(made: tuple[Case, ReshardPlan]) -> None:
    _, plan = made
    for relay in plan.relays:
        on_path = [plan.hosts[rank] for rank in relay.path]
        assert len(set(on_path)) == len(on_path), "a chain visits every host once"
        for leader, group in zip(relay.path, relay.readers, strict=True):
            assert all(plan.hosts[rank] == plan.hosts[leader] for rank in group)
        assert 1 <= relay.num_chunks <= MAX_CHUNKS


@given(plans())
def test_an_interface_does_one_thing_at_a_time(made: tuple[Case, ReshardPlan]) -> None:
    _, plan = made
    for sends in (True, False):
        busy: dict[int, list[tuple[int, int, int]]] = {}
        for number, relay in enumerate(plan.relays):
            ranks = relay.path[:1] if sends else relay.path[1:]
            for rank in ranks:
                busy.setdefault(plan.hosts[rank], []).append((relay.begin, relay.end, number))
        for spans in busy.values():
            for before, after in pairwise(sorted(span for span in spans if span[0] < span[1])):
                assert before[1] <= after[0], (plan.relays[before[2]], plan.relays[after[2]])


@given(plans())
def test_nothing_is_planned_below_the_bound(made: tuple[Case, ReshardPlan]) -> None:
    _, plan = made
    assert plan.makespan_bytes >= plan.bound_bytes
    assert plan.ratio >= 1


@given(plans())
def test_a_plan_depends_on_what_it_moves_alone(made: tuple[Case, ReshardPlan]) -> None:
    case, plan = made
    held, needed = case.tiles()
    names = {"strategy": plan.strategy, "algorithm": plan.algorithm}
    first = make_plan(held, needed, 1, plan.hosts, **names)
    again = make_plan(dict(reversed(held.items())), dict(reversed(needed.items())), 1, plan.hosts, **names)
    assert again == first
    assert again.digest == first.digest


def test_a_chain_serves_who_asks_first_before_who_asks_later() -> None:
    held, needed = {0: tile(8)}, {1: tile(8), 2: tile(8), 3: tile(8), 4: tile(8)}
    hosts = [0, 1, 2, 1, 2]
    (relay,) = make_plan(held, needed, 4, hosts, waves={1: 7, 3: 2, 2: 5, 4: 1}).relays
    assert relay.path == (0, 4, 3)
    assert relay.readers == ((), (2,), (1,))


def test_small_transfers_stay_whole_and_large_ones_are_cut_by_size() -> None:
    network = Network(bytes_per_us=25.0, chunk_us=100.0)
    assert network.chunk_count(1000, num_hops=4) == 1
    assert network.chunk_count(25_000_000, num_hops=1) == 1
    assert 100 < network.chunk_count(25_000_000, num_hops=4) < 200
    assert network.chunk_count(10**12, num_hops=4) == MAX_CHUNKS


@given(cases(), st.integers(1, 8))
def test_a_signal_is_one_element_of_each_task_for_every_host_that_waits(case: Case, per_host: int) -> None:
    hosts = [rank // per_host for rank in range(NUM_RANKS)]
    held, needed = case.tiles()
    whole, plan = (make_plan(held, needed, 4, hosts, strategy=name) for name in ("broadcast", SIGNAL))
    assert plan.tasks == whole.tasks
    assert [relay.num_elements for relay in plan.relays] == [1] * len(plan.relays)
    assert plan.num_bytes == 4 * sum(relay.num_hops for relay in plan.relays)
    for number, task in enumerate(plan.tasks):
        told = {rank for relay in plan.relays if relay.task == number for rank in _takers(relay)}
        assert told == set(task.receivers) - set(task.senders), "nobody waits in vain"


def test_a_signal_inside_a_host_is_one_element_too() -> None:
    held, needed = {0: tile(1000)}, {1: tile(1000), 2: tile(1000)}
    inside, between = (make_plan(held, needed, 4, hosts, strategy=SIGNAL) for hosts in ([0, 0, 0], [0, 1, 2]))
    assert [relay.num_elements for relay in inside.relays] == [1]
    assert (inside.num_bytes, between.num_bytes) == (0, 8)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownStrategyError, match=r"'broadcats'.*did you mean 'broadcast'"):
        make_plan({0: tile(2)}, {1: tile(2)}, 4, [0, 1], strategy="broadcats")
    with pytest.raises(UnknownAlgorithmError, match=r"'greed'.*did you mean 'greedy'"):
        make_plan({0: tile(2)}, {1: tile(2)}, 4, [0, 1], algorithm="greed")


def tile(size: int) -> Tile:
    """All of a vector."""
    return Tile((((0, size),),))
