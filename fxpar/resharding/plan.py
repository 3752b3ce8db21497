"""The plan of a resharding: what each rank sends to which others, in which order, and the predicted time."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby, pairwise

from fxpar.hardware.network import LOOPBACK, Network
from fxpar.resharding.search import Flow, Slot, lower_bound, search
from fxpar.resharding.show import table, timeline
from fxpar.resharding.strategies import EXCHANGING, SIGNAL, Cut, Group, Leg, Strategy, strategy_named
from fxpar.resharding.tile import Tiles
from fxpar.resharding.units import UnitTask, unit_tasks


@dataclass(frozen=True, slots=True)
class Relay:
    """A transfer of elements `start` to `stop` of a unit task's region along `path`, from each rank to the next.

    `readers[i]` are the ranks of the host of `path[i]` that read the elements from its memory. A path of one rank stays
    inside its host. The sender's interface is busy from `begin` to `end`, in bytes at the rate of a host's interface.
    """

    task: int
    start: int
    stop: int
    path: tuple[int, ...]
    readers: tuple[Group, ...]
    begin: int
    end: int
    num_chunks: int

    @property
    def num_elements(self) -> int:
        """How many elements it moves."""
        return self.stop - self.start

    @property
    def num_hops(self) -> int:
        """How many interfaces send it, one after another."""
        return len(self.path) - 1


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The transfers that make the destination's tiles from the source's; the same on every rank that makes it.

    The model: a host's interface is the bottleneck, full duplex; transfers inside a host are free, and a rank copies
    what it holds already. `bound_bytes` is the result of `lower_bound`. Relays are in the order in which they begin.
    """

    strategy: str
    algorithm: str
    itemsize: int
    hosts: tuple[int, ...]
    tasks: tuple[UnitTask, ...]
    relays: tuple[Relay, ...]
    bound_bytes: Fraction
    network: Network

    @property
    def makespan_bytes(self) -> int:
        """When the last relay is sent, in bytes at the rate of a host's interface."""
        return max((relay.end for relay in self.relays), default=0)

    @property
    def ratio(self) -> float:
        """The makespan over the bound; 1.0 if nothing moves between hosts."""
        return float(self.makespan_bytes / self.bound_bytes) if self.bound_bytes else 1.0

    @property
    def num_bytes(self) -> int:
        """The bytes that move between hosts, counted once per receiving interface."""
        return sum(relay.num_elements * relay.num_hops for relay in self.relays) * self.itemsize

    def time_us(self, network: Network) -> float:
        """The predicted time on `network`, in microseconds.

        It is the planned end of the last relay, with the time of its last chunk along the chain, plus the cost of all
        messages of the interface that sends most of them.
        """
        ends, messages = [0.0], Counter[int]()
        for relay in self.relays:
            if relay.num_hops:
                chunk = relay.num_elements * self.itemsize / relay.num_chunks
                ends.append(network.time_us(relay.end + (relay.num_hops - 1) * chunk))
                for rank in relay.path[:-1]:
                    messages[self.hosts[rank]] += relay.num_chunks
        return max(ends) + network.chunk_us * max(messages.values(), default=0)

    def moved_to(self, ranks: Sequence[int], hosts: Sequence[int]) -> ReshardPlan:
        """The same plan for other ranks: `ranks[r]`, ascending, in place of rank r.

        It is what `make_plan` returns for them if `hosts`, the host of every rank, are in the same order for these
        ranks as for those of this plan.
        """

        def moved(group: Group) -> Group:
            return tuple(ranks[rank] for rank in group)

        tasks = (UnitTask(task.region, moved(task.senders), moved(task.receivers)) for task in self.tasks)
        relays = (
            replace(relay, path=moved(relay.path), readers=tuple(map(moved, relay.readers))) for relay in self.relays
        )
        return replace(self, hosts=tuple(hosts), tasks=tuple(tasks), relays=tuple(relays))

    @property
    def digest(self) -> str:
        """A short hash of the plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return table(self)

    def timeline(self) -> str:
        """An SVG document that shows what every host sends and receives, and when."""
        return timeline(self)


def make_plan(
    source: Tiles,
    destination: Tiles,
    itemsize: int,
    hosts: Sequence[int],
    strategy: str = "broadcast",
    algorithm: str = "best",
    *,
    seed: int = 0,
    network: Network = LOOPBACK,
    waves: Mapping[int, int] | None = None,
) -> ReshardPlan:
    """Plan the transfers from tiles `source` to tiles `destination`, with `itemsize` bytes per element.

    Args:
        hosts: the host of every rank.
        seed: of the randomised search.
        network: determines the numbers of chunks.
        waves: the order in which ranks post their receives, if not all at once (default of each: 0). A chain serves
            lower waves first, and only receivers of the same wave exchange parts, so that no rank depends on one that
            posts later.

    Raises:
        UnknownStrategyError, UnknownAlgorithmError: no such name.
    """
    carry = strategy_named(strategy)
    tasks = unit_tasks(source, destination)
    wholes = [whole_flow(task, itemsize, hosts) for task in tasks]
    planner = _Planner(tasks, wholes, itemsize, hosts, network, waves or {})
    legs = list(planner.legs(carry, in_waves=strategy in EXCHANGING))
    slots = search([planner.flow(task, leg) for task, leg in legs], algorithm, seed=seed)
    relays = [*planner.inside_hosts(1 if strategy == SIGNAL else None), *planner.between_hosts(legs, slots)]
    bound = lower_bound(wholes)
    return ReshardPlan(strategy, algorithm, itemsize, tuple(hosts), tasks, tuple(relays), Fraction(bound), network)


def whole_flow(task: UnitTask, itemsize: int, hosts: Sequence[int]) -> Flow:
    """The least that must move between hosts for a task: its region once into every host where no rank holds it."""
    senders = {hosts[rank] for rank in task.senders}
    receivers = {hosts[rank] for rank in task.receivers} - senders
    return Flow(task.num_elements * itemsize, tuple(sorted(senders)), tuple(sorted(receivers)))


class _Planner:
    """Turns tasks to the flows that are searched, and the slots that were found to relays."""

    def __init__(
        self,
        tasks: Sequence[UnitTask],
        wholes: Sequence[Flow],
        itemsize: int,
        hosts: Sequence[int],
        network: Network,
        waves: Mapping[int, int],
    ) -> None:
        self._tasks, self._wholes, self._itemsize, self._hosts = tasks, wholes, itemsize, hosts
        self._network, self._waves = network, waves
        self._sent: Counter[int] = Counter()
        self._led: Counter[int] = Counter()

    def legs(self, carry: Strategy, *, in_waves: bool) -> Iterator[tuple[int, Leg]]:
        """Task numbers with the legs between hosts that carry them out."""
        for number, task in enumerate(self._tasks):
            holding = self._wholes[number].senders
            needing = [rank for rank in task.receivers if self._hosts[rank] not in holding]
            if needing:
                for together in self._by_wave(needing) if in_waves else [needing]:
                    for leg in carry(task.num_elements, self._groups(together)):
                        yield number, leg

    def flow(self, number: int, leg: Leg) -> Flow:
        """The flow of a leg, for the search."""
        ring = {self._hosts[group[0]]: None for cut in leg.cuts for group in cut.ring}
        return Flow(leg.num_elements * self._itemsize, self._wholes[number].senders, tuple(ring))

    def inside_hosts(self, most: int | None) -> Iterator[Relay]:
        """The relays inside hosts, from holders to receivers: all elements of each task, or at most `most`."""
        for number, task in enumerate(self._tasks):
            holding = self._wholes[number].senders
            needing = [rank for rank in task.receivers if self._hosts[rank] in holding and rank not in task.senders]
            for group in self._groups(needing):
                sender = self._least(task, self._hosts[group[0]])
                count = task.num_elements if most is None else min(most, task.num_elements)
                yield Relay(number, 0, count, (sender,), (group,), 0, 0, 1)

    def between_hosts(self, legs: Sequence[tuple[int, Leg]], slots: Sequence[Slot]) -> Iterator[Relay]:
        """The relays of all legs, in the order of their slots."""
        for (number, leg), slot in sorted(zip(legs, slots, strict=True), key=lambda found: found[1].start):
            sender = self._least(self._tasks[number], slot.sender)
            self._sent[sender] += leg.num_elements
            for cut, (begin, end) in zip(leg.cuts, _shares(leg, slot), strict=True):
                yield self._relay(number, cut, sender, begin, end)

    def _relay(self, number: int, cut: Cut, sender: int, begin: int, end: int) -> Relay:
        path = (sender, *(group[0] for group in cut.ring))
        readers = ((), *(group[1:] for group in cut.ring))
        num_bytes = (cut.stop - cut.start) * self._itemsize
        # Reading from a leader's memory counts as one more hop, although a fast one.
        hops = len(cut.ring) + any(readers)
        return Relay(number, cut.start, cut.stop, path, readers, begin, end, self._network.chunk_count(num_bytes, hops))

    def _by_wave(self, ranks: Sequence[int]) -> list[list[int]]:
        """The receivers of each wave, the lowest wave first."""
        waves = sorted({self._waves.get(rank, 0) for rank in ranks})
        return [[rank for rank in ranks if self._waves.get(rank, 0) == wave] for wave in waves]

    def _groups(self, ranks: Sequence[int]) -> list[Group]:
        """Receivers by host, those of the lowest wave first; the least busy of these is the leader of its host."""
        ordered = sorted(ranks, key=lambda rank: (self._waves.get(rank, 0), rank))
        by_host: dict[int, list[int]] = {}
        for rank in ordered:
            by_host.setdefault(self._hosts[rank], []).append(rank)
        groups = []
        for members in by_host.values():
            _, first = next(groupby(members, key=lambda rank: self._waves.get(rank, 0)))
            leader = min(first, key=lambda rank: (self._led[rank], rank))
            self._led[leader] += 1
            groups.append((leader, *(rank for rank in members if rank != leader)))
        return groups

    def _least(self, task: UnitTask, host: int) -> int:
        """The rank of `host` that holds the task's region and has sent least."""
        holders = (rank for rank in task.senders if self._hosts[rank] == host)
        return min(holders, key=lambda rank: (self._sent[rank], rank))


def _shares(leg: Leg, slot: Slot) -> Iterator[tuple[int, int]]:
    """The begin and end of each of a leg's cuts within the leg's slot."""
    total = sum(cut.stop - cut.start for cut in leg.cuts)
    done = [slot.start]
    count = 0
    for cut in leg.cuts:
        count += cut.stop - cut.start
        done.append(slot.start + (slot.end - slot.start) * count // max(total, 1))
    return pairwise(done)
