"""Who multiplies, sends and holds what, in which order: no two ranks begin with the same peer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def after(rank: int, num_ranks: int) -> list[int]:
    """All other ranks in the order of the ring: 6, 7, 0, 1, 2, 3, 4 for rank 5 of 8."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def holder(hosts: Sequence[int], part: int, host: int) -> int:
    """The rank of `host` in whose memory its ranks find the piece of `part`: of another host's, one receives it.

    hosts: the host of each rank, from 0 on.
    """
    if hosts[part] == host:
        return part
    here = [rank for rank, its in enumerate(hosts) if its == host]
    away = [rank for rank, its in enumerate(hosts) if its != host]
    return here[away.index(part) % len(here)]


def held(hosts: Sequence[int], rank: int) -> list[int]:
    """The parts that lie in the memory of `rank`: its own first, and those that it receives in the order they come."""
    away = [part for part, its in enumerate(hosts) if its != hosts[rank] and holder(hosts, part, hosts[rank]) == rank]
    return [rank, *sorted(away, key=lambda part: _hops(hosts, part, hosts[rank]))]


def sender(hosts: Sequence[int], part: int, rank: int) -> int:
    """Who passes the piece of `part` to `rank`, which holds it for its host: pieces go from host to host in a ring.

    So each link carries one message at a time, and pieces come one after another, without waiting for their turn.
    """
    return holder(hosts, part, (hosts[rank] + 1) % _num_hosts(hosts))


def receiver(hosts: Sequence[int], part: int, rank: int) -> int | None:
    """To whom `rank` passes the piece of `part`, which it holds for its host; None where all hosts have it."""
    following = (hosts[rank] - 1) % _num_hosts(hosts)
    return None if hosts[part] == following else holder(hosts, part, following)


def _num_hosts(hosts: Sequence[int]) -> int:
    return max(hosts) + 1


def _hops(hosts: Sequence[int], part: int, host: int) -> int:
    """How often a piece was passed on when it has reached `host`."""
    return (hosts[part] - host) % _num_hosts(hosts)


def near_first(hosts: Sequence[int], rank: int) -> list[int]:
    """The order in which `rank` takes the pieces of others: those of its host, then the rest as they come."""
    return sorted(after(rank, len(hosts)), key=lambda other: _hops(hosts, other, hosts[rank]))


def far_first(hosts: Sequence[int], rank: int) -> list[int]:
    """The order in which `rank` computes for others: what has to be sent, then what stays on its host."""
    return sorted(after(rank, len(hosts)), key=lambda other: hosts[other] == hosts[rank])


@lru_cache
def adder_before(hosts: tuple[int, ...], owner: int, rank: int) -> int | None:
    """Who adds to the piece of `owner` before `rank` does, of the owner's host; None if `rank` is the first there.

    The first is the one before the owner, which is the last. So every rank adds to the piece of the next one first, and
    each waits for the same other, which is one piece ahead of it.
    """
    here = [other for other, its in enumerate(hosts) if its == hosts[owner]]
    before = here[(here.index(rank) + 1) % len(here)]
    return None if before == owner else before
