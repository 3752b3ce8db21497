"""The strategies by which a unit task is carried out (Zhuang et al., section 3.1), each as a set of relays.

A relay passes elements from a sender to one leader per receiver host, one after another, in chunks; leaders share
with the other receivers of their host. Time to move one slice, t on one interface, to A hosts of B devices:

    send_recv         every receiver is sent its own copy                                  A B t
    local_allgather   every host is sent one copy in B parts, which its devices exchange   A t
    global_allgather  one copy in A B parts, which all receivers exchange                  t + t (A - 1) / A
    broadcast         one copy passes from host to host in K chunks                        t (K + A - 1) / K

The paper bounds global_allgather by 2 t, with as many hosts as one likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fxpar.errors import UnknownStrategyError

SIGNAL = "signal"
"""The strategy that delivers nothing but the news that something would have arrived."""

Group: TypeAlias = tuple[int, ...]
"""The receivers of one host, the leader first."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements from `start` to before `stop` of a task's region, and the way they take: host after host."""

    start: int
    stop: int
    ring: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Leg:
    """What one sender gives in one go: `num_elements` at its interface, in `cuts`, one after another."""

    num_elements: int
    cuts: tuple[Cut, ...]


Strategy: TypeAlias = Callable[[int, Sequence[Group]], list[Leg]]
"""From a region's number of elements and its receivers by host to the legs of its task."""


def send_recv(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """Every receiver for itself."""
    return [Leg(num_elements, (Cut(0, num_elements, ((rank,),)),)) for group in groups for rank in group]


def local_allgather(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """Every host for itself, each of its devices first with a part of its own."""
    return [
        Leg(num_elements, tuple(Cut(*part, (_led_by(rank, group),)) for rank, part in _parts(num_elements, group)))
        for group in groups
    ]


def global_allgather(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """All receivers together, each first with a part of its own, which then goes around the hosts."""
    everyone = [rank for group in groups for rank in group]
    cuts = [Cut(*part, _ring_from(rank, groups)) for rank, part in _parts(num_elements, everyone)]
    # While the last part is sent, the others are on their way around; what is left is to pass on 1 - 1/A of it all.
    return [Leg(num_elements + num_elements * (len(groups) - 1) // len(groups), tuple(cuts))]


def broadcast(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """One chain over the hosts."""
    return [Leg(num_elements, (Cut(0, num_elements, tuple(groups)),))]


def signal(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """As broadcast, but of the first element alone: what a transfer costs that has no bytes to move.

    What arrives is meaningless. It bounds from above how fast any strategy could be (Zhuang et al., section 5).
    """
    return [Leg(1, (Cut(0, 1, tuple(groups)),))] if num_elements else []


STRATEGIES: Mapping[str, Strategy] = {
    "broadcast": broadcast,
    "send_recv": send_recv,
    "local_allgather": local_allgather,
    "global_allgather": global_allgather,
}
"""Those that deliver what they are asked to."""

EXCHANGING = frozenset({"local_allgather", "global_allgather"})
"""Those in which each receiver depends on all the others of its leg."""


def strategy_named(name: str) -> Strategy:
    """The strategy of that name: one of `STRATEGIES`, or "signal".

    Raises:
        UnknownStrategyError: there is none.
    """
    known = {**STRATEGIES, SIGNAL: signal}
    if name not in known:
        raise UnknownStrategyError(name, tuple(known))
    return known[name]


def _parts(num_elements: int, ranks: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Each rank's share of the elements, as even as can be; ranks without any are left out."""
    bounds = [num_elements * i // len(ranks) for i in range(len(ranks) + 1)]
    shares = zip(ranks, pairwise(bounds), strict=True)
    return [(rank, share) for rank, share in shares if share[0] < share[1]]


def _led_by(rank: int, group: Group) -> Group:
    return (rank, *(other for other in group if other != rank))


def _ring_from(rank: int, groups: Sequence[Group]) -> tuple[Group, ...]:
    """The hosts in order, starting at that of `rank`, who leads it."""
    (first,) = (number for number, group in enumerate(groups) if rank in group)
    return (_led_by(rank, groups[first]), *groups[first + 1 :], *groups[:first])
