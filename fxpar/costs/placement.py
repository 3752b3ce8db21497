"""How the axes of a mesh are placed on hosts, and the bandwidth that collectives have: Eq. 10 for any placement."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from fxpar.hardware.cluster import Cluster
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Spread:
    """How the groups of ranks along one axis are spread over hosts.

    num_hosts: of the group that spans the most.
    rings_per_host: the largest number of groups that leave one host; 0 if every group is within a host.
    """

    size: int
    num_hosts: int
    rings_per_host: int


def spread(mesh: Mesh, axis: str) -> Spread:
    """How the groups of `mesh` along `axis` are spread over its hosts. All of them communicate at once."""
    sizes = list(mesh.sizes.values())
    hosts = np.moveaxis(np.asarray(mesh.hosts).reshape(sizes), list(mesh.sizes).index(axis), -1)
    groups = [set(group.tolist()) for group in hosts.reshape(-1, mesh.sizes[axis])]
    leaving = Counter(host for group in groups if len(group) > 1 for host in group)
    return Spread(mesh.sizes[axis], max(map(len, groups)), max(leaving.values(), default=0))


def bytes_per_us(cluster: Cluster, spread_over: Spread) -> float:
    """The bandwidth of a rank in a ring: Singh et al., Eq. 10, with the actual number of rings that leave a host.

    A ring is as fast as its slowest link, so that one between hosts is never faster than one inside a host.
    """
    if not spread_over.rings_per_host:
        return cluster.intra_bytes_per_us
    return min(cluster.intra_bytes_per_us, cluster.host_bytes_per_us / spread_over.rings_per_host)


def latency_us(cluster: Cluster, spread_over: Spread) -> float:
    """The latency of a collective: the messages along a tree, one after another, between hosts and inside them."""
    between = math.log2(spread_over.num_hosts)
    return between * cluster.inter_latency_us + (math.log2(spread_over.size) - between) * cluster.intra_latency_us


def consecutive_hosts(num_ranks: int, ranks_per_host: int) -> tuple[int, ...]:
    """The host of each rank where hosts are filled one after another."""
    return tuple(rank // ranks_per_host for rank in range(num_ranks))
