"""Time collectives inside hosts and between them, on the ranks that run this."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from fxpar._torch.distributed import c10d_functional
from fxpar.calibrate.compute import wait_for
from fxpar.calibrate.fit import Line, fit_line
from fxpar.costs.equations import elements_sent
from fxpar.ir.node_meta import CollectiveKind
from fxpar.lowering.cpu_collectives import collectives_of

Place: TypeAlias = Literal["inside hosts", "one ring between hosts", "all rings between hosts"]
"""Which ranks form groups: those of each host; the first of every host; those at the same place of every host."""

KINDS: tuple[CollectiveKind, ...] = ("all_gather", "all_reduce", "reduce_scatter")
SIZES = {"cpu": (2**10, 2**14, 2**18, 2**20, 2**22), "cuda": (2**10, 2**16, 2**20, 2**24, 2**28)}
"""Bytes of the larger of a rank's input and output."""

REPEATS = 5
_RUN_BYTES = 2**21
_MOST_RUNS = 10


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """A collective of `num_ranks` ranks, each of which sends `bytes_sent` in a ring."""

    place: Place
    kind: CollectiveKind
    num_ranks: int
    bytes_sent: float
    time_us: float


def time_collectives(
    hosts: Sequence[int], device: torch.device, sizes: Iterable[int] | None = None, repeats: int = REPEATS
) -> list[TimedCollective]:
    """Time all kinds and sizes of collectives, interleaved; a collective of the world, with one result for all ranks.

    hosts: the host of each rank.
    """
    groups = _groups(hosts)
    cases = [(place, kind, size) for place in groups for kind in KINDS for size in sizes or SIZES[device.type]]
    seconds: dict[str, list[float]] = defaultdict(list)
    names = {str(case): case for case in cases}
    for name in alternate(list(names), 1 + repeats):
        place, kind, size = names[name]
        dist.barrier()
        own = groups[place]
        seconds[name].append(math.nan if own is None else _time_s(kind, size, own, device))
    slowest = _slowest({name: statistics.median(found[1:]) for name, found in seconds.items()})
    return [
        TimedCollective(
            place, kind, num_ranks, elements_sent(kind, size, num_ranks), 1e6 * slowest[str((place, kind, size))]
        )
        for place, kind, size in cases
        for num_ranks in [_num_ranks(place, hosts)]
    ]


def alternate(names: Sequence[str], rounds: int) -> Iterator[str]:
    """All names in every round, in reverse in every other round, so that no case always follows the same one."""
    for turn in range(rounds):
        yield from reversed(names) if turn % 2 else names


def fit_place(timed: Sequence[TimedCollective], place: Place, *kinds: CollectiveKind) -> Line | None:
    """The line through the collectives of `kinds` at `place`; None where there are none."""
    points = [(each.bytes_sent, each.time_us) for each in timed if each.place == place and each.kind in kinds]
    return fit_line(points) if points else None


def _members(place: Place, hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each group."""
    of_hosts: dict[int, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        of_hosts[host].append(rank)
    if place == "inside hosts":
        return list(of_hosts.values())
    rings = [[rank for rank in ring if rank is not None] for ring in zip_longest(*of_hosts.values())]
    return rings[:1] if place == "one ring between hosts" else rings


def _num_ranks(place: Place, hosts: Sequence[int]) -> int:
    return max(map(len, _members(place, hosts)))


def _groups(hosts: Sequence[int]) -> Mapping[Place, dist.ProcessGroup | None]:
    """This rank's group at each place where there are groups of several ranks; None where it is in none."""
    found: dict[Place, dist.ProcessGroup | None] = {}
    for place in get_args(Place):
        members = _members(place, hosts)
        # If hosts have one rank each, all rings are one ring.
        if max(map(len, members)) == 1 or (place == "all rings between hosts" and len(members) == 1):
            continue
        made = [(ranks, dist.new_group(ranks)) for ranks in members if len(ranks) > 1]
        found[place] = next((group for ranks, group in made if dist.get_rank() in ranks), None)
    return found


def _time_s(kind: CollectiveKind, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """The time of one of several runs in a row, so that it matters little which rank starts the first run early."""
    parts = group.size()
    count = math.ceil(num_bytes / 4 / parts) * parts
    tensor = torch.ones(count // parts if kind == "all_gather" else count, device=device)
    runs = max(1, min(_MOST_RUNS, _RUN_BYTES // num_bytes))
    wait_for(device)
    start = time.perf_counter()
    for _ in range(runs):
        _run(kind, tensor, group)
    wait_for(device)
    return (time.perf_counter() - start) / runs


def _run(kind: CollectiveKind, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    own = collectives_of(group, tensor.device.type)
    match kind:
        case "all_gather":
            started = own.all_gather(tensor)
        case "all_reduce":
            started = own.all_reduce(tensor, "sum")
        case _:
            started = own.reduce_scatter(tensor, "sum")
    c10d_functional.wait_tensor(started)


def _slowest(own: Mapping[str, float]) -> dict[str, float]:
    """By name, the longest time of any rank that took part; a collective of the world."""
    of_ranks: list[Mapping[str, float]] = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {name: max(times[name] for times in of_ranks if not math.isnan(times[name])) for name in own}
