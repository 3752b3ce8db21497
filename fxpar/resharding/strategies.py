"""The strategies to carry out a unit task (Zhuang et al., section 3.1), each as a set of relays.

A relay sends elements from a sender to one leader per receiver host, one after another, in chunks; the other receivers
of a host read from their leader's memory. Time to move one slice, which takes t on one interface, to A hosts of B
devices:

    send_recv         every receiver is sent its own copy                                  A B t
    local_allgather   every host is sent one copy in B parts, which its devices exchange   A t
    global_allgather  one copy in A B parts, which all receivers exchange                  t + t (A - 1) / A
    broadcast         one copy is forwarded from host to host in K chunks                  t (K + A - 1) / K

The paper bounds global_allgather by 2 t, for any number of hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fxpar.errors import UnknownStrategyError

SIGNAL = "signal"
"""The strategy that sends a single element, as a signal that the value would have arrived."""

Group: TypeAlias = tuple[int, ...]
"""The receivers of one host, the leader first."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements `start` to `stop` (exclusive) of a task's region, and the receiving hosts in the order of the chain."""

    start: int
    stop: int
    ring: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Leg:
    """A transfer from one sender, of `cuts` one after another; its interface is busy for `num_elements` elements."""

    num_elements: int
    cuts: tuple[Cut, ...]


Strategy: TypeAlias = Callable[[int, Sequence[Group]], list[Leg]]
"""Maps a region's number of elements and its receivers by host to the legs of its task."""


def send_recv(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """A copy for every receiver."""
    return [Leg(num_elements, (Cut(0, num_elements, ((rank,),)),)) for group in groups for rank in group]


def local_allgather(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """A copy for every host, in parts: each device receives one part, and shares it with the host's others."""
    return [
        Leg(num_elements, tuple(Cut(*part, (_led_by(rank, group),)) for rank, part in _parts(num_elements, group)))
        for group in groups
    ]


def global_allgather(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """One copy in parts: each receiver gets one part, which is then forwarded around the hosts."""
    everyone = [rank for group in groups for rank in group]
    cuts = [Cut(*part, _ring_from(rank, groups)) for rank, part in _parts(num_elements, everyone)]
    # While the last part is sent, the others are being forwarded; what remains is to forward 1 - 1/A of the whole.
    return [Leg(num_elements + num_elements * (len(groups) - 1) // len(groups), tuple(cuts))]


def broadcast(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """One chain over the hosts."""
    return [Leg(num_elements, (Cut(0, num_elements, tuple(groups)),))]


def signal(num_elements: int, groups: Sequence[Group]) -> list[Leg]:
    """Like `broadcast`, but of the first element only: it costs what a transfer without bytes would.

    The received values are meaningless. No strategy can be faster than this (Zhuang et al., section 5).
    """
    return [Leg(1, (Cut(0, 1, tuple(groups)),))] if num_elements else []


STRATEGIES: Mapping[str, Strategy] = {
    "broadcast": broadcast,
    "send_recv": send_recv,
    "local_allgather": local_allgather,
    "global_allgather": global_allgather,
}
"""All strategies that deliver the whole value, by name."""

EXCHANGING = frozenset({"local_allgather", "global_allgather"})
"""The strategies in which each receiver depends on all others of its leg."""


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
    """Each rank's share of the elements, as even as possible; ranks without any are left out."""
    bounds = [num_elements * i // len(ranks) for i in range(len(ranks) + 1)]
    shares = zip(ranks, pairwise(bounds), strict=True)
    return [(rank, share) for rank, share in shares if share[0] < share[1]]


def _led_by(rank: int, group: Group) -> Group:
    return (rank, *(other for other in group if other != rank))


def _ring_from(rank: int, groups: Sequence[Group]) -> tuple[Group, ...]:
    """The hosts in order, starting at that of `rank`, which is its leader."""
    (first,) = (number for number, group in enumerate(groups) if rank in group)
    return (_led_by(rank, groups[first]), *groups[first + 1 :], *groups[:first])
