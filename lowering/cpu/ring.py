"""The order in which ranks multiply, send and receive pieces: no two ranks begin with the same peer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def after(rank: int, num_ranks: int) -> list[int]:
    """All other ranks in the order of the ring: 6, 7, 0, 1, 2, 3, 4 for rank 5 of 8."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def holder(hosts: Sequence[int], part: int, host: int) -> int:
    """The rank of `host` whose memory has the piece of `part`: `part` itself, or the rank that receives it for `host`.

    hosts: the host of each rank, from 0 on.
    """
    if hosts[part] == host:
        return part
    here = [rank for rank, its in enumerate(hosts) if its == host]
    away = [rank for rank, its in enumerate(hosts) if its != host]
    return here[away.index(part) % len(here)]


def held(hosts: Sequence[int], rank: int) -> list[int]:
    """The parts in the memory of `rank`: its own first, then those that it receives, in the order of their arrival."""
    away = [part for part, its in enumerate(hosts) if its != hosts[rank] and holder(hosts, part, hosts[rank]) == rank]
    return [rank, *sorted(away, key=lambda part: _hops(hosts, part, hosts[rank]))]


def sender(hosts: Sequence[int], part: int, rank: int) -> int:
    """The rank that sends the piece of `part` to `rank`, which holds it for its host: hosts forward pieces in a ring.

    So each link carries one message at a time, and pieces arrive one after another, without contention.
    """
    return holder(hosts, part, (hosts[rank] + 1) % _num_hosts(hosts))


def receiver(hosts: Sequence[int], part: int, rank: int) -> int | None:
    """The rank to which `rank` forwards the piece of `part` that it holds for its host; None if all hosts have it."""
    following = (hosts[rank] - 1) % _num_hosts(hosts)
    return None if hosts[part] == following else holder(hosts, part, following)


def _num_hosts(hosts: Sequence[int]) -> int:
    return max(hosts) + 1


def _hops(hosts: Sequence[int], part: int, host: int) -> int:
    """How often a piece has been sent when it has reached `host`."""
    return (hosts[part] - host) % _num_hosts(hosts)


def near_first(hosts: Sequence[int], rank: int) -> list[int]:
    """The order in which `rank` reads the pieces of others: those of its host, then the rest as they arrive."""
    return sorted(after(rank, len(hosts)), key=lambda other: _hops(hosts, other, hosts[rank]))


def far_first(hosts: Sequence[int], rank: int) -> list[int]:
    """The order in which `rank` computes terms for others: those that have to be sent, then those of its own host."""
    return sorted(after(rank, len(hosts)), key=lambda other: hosts[other] == hosts[rank])


@lru_cache
def adder_before(hosts: tuple[int, ...], owner: int, rank: int) -> int | None:
    """The rank that adds to the piece of `owner` right before `rank`, on the same host; None if `rank` is the first.

    The first to add is the rank before the owner in the ring, the last is the owner. So every rank adds to the piece of
    its successor first, and always waits for the same rank, which is one piece ahead of it.
    """
    here = [other for other, its in enumerate(hosts) if its == hosts[owner]]
    before = here[(here.index(rank) + 1) % len(here)]
    return None if before == owner else before
