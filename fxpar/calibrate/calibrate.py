"""Measure the cluster that this runs on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxpar.calibrate.compute import MatmulRate, matmul_rates, memory_bytes, memory_bytes_per_us
from fxpar.calibrate.fit import Line
from fxpar.calibrate.network import TimedCollective, fit_place, time_collectives
from fxpar.hardware.cluster import Cluster, default_cluster
from fxpar.hardware.machine import describe_machine
from fxpar.world.hosts import discover_hosts


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cluster, and the measurements that it is derived from."""

    cluster: Cluster
    matmuls: Sequence[MatmulRate]
    collectives: Sequence[TimedCollective]


def calibrate(name: str, device: torch.device, say: Callable[[str], None]) -> Calibration:
    """Measure all ranks together; a collective of the world, which returns the same on every rank.

    Figures that need several ranks per host, or several hosts, where there are none, are those of the default cluster:
    `Cluster.source` says so.
    """
    hosts = discover_hosts()
    on_host = Counter(hosts)
    say("multiplying matrices")
    matmuls = _slowest_matmuls(list(matmul_rates(device)))
    say("copying memory")
    copied = _least(memory_bytes_per_us(device))
    say("timing collectives")
    timed = time_collectives(hosts, device)
    ranks_per_host = max(on_host.values())
    default = default_cluster(device.type)
    inside = fit_place(timed, "inside hosts", "all_gather", "all_reduce")
    ring = fit_place(timed, "one ring between hosts", "all_gather", "all_reduce")
    rings = fit_place(timed, "all rings between hosts", "all_gather", "all_reduce") or ring
    interfaces, interface_rate = _interfaces(ring, rings, ranks_per_host)
    assumed = [what for what, line in (("inside hosts", inside), ("between hosts", ring)) if line is None]
    cluster = Cluster(
        name=name,
        source=_source(hosts, assumed, default.name),
        device_type=device.type,
        ranks_per_host=ranks_per_host,
        matmul_flops_per_us=_best_rates(matmuls),
        memory_bytes_per_us=copied,
        memory_bytes=_least(memory_bytes(device, on_host[hosts[dist.get_rank()]])),
        intra_bytes_per_us=inside.bytes_per_us if inside else default.intra_bytes_per_us,
        intra_latency_us=inside.latency_us / math.log2(ranks_per_host) if inside else default.intra_latency_us,
        interface_bytes_per_us=interface_rate or default.interface_bytes_per_us,
        interfaces_per_host=interfaces or default.interfaces_per_host,
        inter_latency_us=ring.latency_us / math.log2(len(on_host)) if ring else default.inter_latency_us,
        reduce_scatter_factor=_reduce_scatter_factor(timed) or default.reduce_scatter_factor,
    )
    return Calibration(cluster, matmuls, timed)


def _interfaces(ring: Line | None, rings: Line | None, ranks_per_host: int) -> tuple[int | None, float | None]:
    """The number of interfaces of a host, and the rate of each: all rings together use all, one ring only one.

    If a single ring is spread over several, they count as one faster interface.
    """
    if ring is None or rings is None:
        return None, None
    together = rings.bytes_per_us * (1 if rings is ring else ranks_per_host)
    count = max(1, round(together / ring.bytes_per_us))
    return count, together / count


def _reduce_scatter_factor(timed: Sequence[TimedCollective]) -> float | None:
    """How much slower a reduce-scatter is than other rings, between hosts if there are several; at least 1."""
    for place in ("one ring between hosts", "inside hosts"):
        slow, fast = fit_place(timed, place, "reduce_scatter"), fit_place(timed, place, "all_gather", "all_reduce")
        if slow and fast:
            return max(1.0, fast.bytes_per_us / slow.bytes_per_us)
    return None


def _source(hosts: Sequence[int], assumed: Sequence[str], default: str) -> str:
    measured = f"measured by `fxpar calibrate` on {len(hosts)} ranks of {len(set(hosts))} hosts: {describe_machine()}"
    links = f"; links {' and '.join(assumed)} are those of {default!r}" if assumed else ""
    return measured + links


def _best_rates(matmuls: Sequence[MatmulRate]) -> dict[str, float]:
    best: dict[str, float] = {}
    for each in matmuls:
        best[each.dtype] = max(best.get(each.dtype, 0.0), each.flops_per_us)
    return best


def _slowest_matmuls(own: list[MatmulRate]) -> list[MatmulRate]:
    """The sizes that all ranks have measured, each at the rate of the slowest rank; a collective of the world."""
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    rates = [{(each.dtype, each.size): each.flops_per_us for each in found} for found in of_ranks]
    common = [key for key in rates[0] if all(key in found for found in rates)]
    return [MatmulRate(*key, min(found[key] for found in rates)) for key in common]


def _least(own: float) -> float:
    """The minimum over all ranks; a collective of the world."""
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return min(of_ranks)
