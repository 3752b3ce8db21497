"""Who multiplies, sends and holds what, in which order: no two ranks begin with the same peer."""

from __future__ import annotations

from collections.abc import Sequence


def after(rank: int, num_ranks: int) -> list[int]:
    """All other ranks in the order of the ring: 6, 7, 0, 1, 2, 3, 4 for rank 5 of 8."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def holder(hosts: Sequence[int], part: int, host: int) -> int:
    """The rank of `host` in whose memory its ranks find the piece of `part`: of another host's, one receives it.

    hosts: the host of each rank.
    """
    if hosts[part] == host:
        return part
    here = [rank for rank, its in enumerate(hosts) if its == host]
    away = [rank for rank, its in enumerate(hosts) if its != host]
    return here[away.index(part) % len(here)]


def held(hosts: Sequence[int], rank: int) -> list[int]:
    """The parts that lie in the memory of `rank`: its own first, and those that it receives as they come."""
    own = hosts[rank]
    return [rank] + [
        part for part in after(rank, len(hosts)) if holder(hosts, part, own) == rank and hosts[part] != own
    ]


def receivers(hosts: Sequence[int], part: int) -> list[int]:
    """The ranks of other hosts that the rank `part` sends its piece to: who needs it first comes first."""
    others = {holder(hosts, part, host) for host in set(hosts) if host != hosts[part]}
    return [rank for rank in reversed(after(part, len(hosts))) if rank in others]


def near_first(hosts: Sequence[int], rank: int) -> list[int]:
    """The order in which `rank` multiplies the pieces of all: its own, then those of its host, then as others come."""
    return [rank, *sorted(after(rank, len(hosts)), key=lambda other: hosts[other] != hosts[rank])]


def far_first(hosts: Sequence[int], rank: int) -> list[int]:
    """The order in which `rank` computes for others: what has to be sent, then what stays on its host, its own last."""
    return [*sorted(after(rank, len(hosts)), key=lambda other: hosts[other] == hosts[rank]), rank]
