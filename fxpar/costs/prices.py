"""Prices in microseconds, by which layouts, stages and meshes are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fxpar.costs.placement import bytes_per_us, latency_us, spread
from fxpar.graph.redistribute import RedistributeKind
from fxpar.hardware.cluster import USABLE_OF_GPU, Cluster, default_cluster
from fxpar.hardware.network import LOOPBACK, Network
from fxpar.world.mesh import Mesh

# Memory takes no time, but it is limited. These prices are far below the time that a link inside a host takes for a
# byte, so that memory only decides between layouts that are about equally fast.
_KEPT_US_PER_BYTE = {"cpu": 1e-5, "cuda": 1e-6}


@dataclass(frozen=True, slots=True)
class Link:
    """The network along one mesh axis: the latency of a collective, and the bandwidth of a rank."""

    latency_us: float
    bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one rank's computation, memory and communication.

    `saved_us_per_byte` is charged for activations kept from forward to backward, `stored_us_per_byte` for parameters;
    both stand for limited memory rather than for time. `reduce_scatter_factor` is how many times the bytes of a
    ring reduce-scatter are really sent: 2 if it is implemented by an all-reduce. A rank takes in its shard of an edge
    between stages at `edge_bytes_per_us`; before that, the edge passes the `network` between their hosts, or the one
    `inside` a host. Arithmetic runs at `flops_per_us` in dtypes that have no rate of their own in `rates`.
    """

    links: Mapping[str, Link]
    edge_bytes_per_us: float
    flops_per_us: float
    memory_bytes_per_us: float
    saved_us_per_byte: float
    stored_us_per_byte: float
    reduce_scatter_factor: float = 1.0
    network: Network = LOOPBACK
    inside: Network = LOOPBACK
    rates: Mapping[torch.dtype, float] = field(default_factory=dict)

    def move_us(self, kind: RedistributeKind, axis: str, bytes_sent: float, bytes_kept: float) -> float:
        """The time of one change of placement along `axis`.

        It is a collective in which each rank sends `bytes_sent`, or a slice that leaves `bytes_kept`.
        """
        if kind is RedistributeKind.SLICE:
            return 2 * bytes_kept / self.memory_bytes_per_us
        factor = self.reduce_scatter_factor if kind is RedistributeKind.REDUCE_SCATTER else 1.0
        link = self.links[axis]
        return link.latency_us + factor * bytes_sent / link.bytes_per_us

    def bucketed_us(self, axis: str, bytes_sent: float) -> float:
        """The time of sending bytes along `axis` as a part of a bucket, without the latency of a collective."""
        return bytes_sent / self.links[axis].bytes_per_us

    def arithmetic_us(self, num_flops: float, dtype: torch.dtype) -> float:
        """The time of floating-point operations with results in `dtype`."""
        return num_flops / self.rates.get(dtype, self.flops_per_us)


def prices_of(mesh: Mesh) -> Prices:
    """The prices of the mesh's cluster, or the default one, for the placement of the axes on the mesh's hosts."""
    cluster = cluster_of(mesh)
    kept = _KEPT_US_PER_BYTE[cluster.device_type]
    return Prices(
        links={axis: _link(cluster, mesh, axis) for axis in mesh.sizes if axis != "pipe"},
        edge_bytes_per_us=cluster.intra_bytes_per_us,
        flops_per_us=cluster.matmul_flops_per_us["float32"],
        memory_bytes_per_us=cluster.memory_bytes_per_us,
        saved_us_per_byte=kept,
        stored_us_per_byte=kept,
        reduce_scatter_factor=cluster.reduce_scatter_factor,
        network=cluster.network,
        inside=cluster.inside,
        rates={getattr(torch, dtype): rate for dtype, rate in cluster.matmul_flops_per_us.items()},
    )


def agnostic_prices_of(mesh: Mesh) -> Prices:
    """`prices_of` without knowledge of hosts: every axis has the whole network between hosts for itself.

    It is only for comparison, to measure the benefit of Eq. 10 of Singh et al.
    """
    cluster = cluster_of(mesh)
    links = {
        axis: Link(math.log2(mesh.sizes[axis]) * cluster.inter_latency_us, cluster.host_bytes_per_us)
        for axis in mesh.sizes
        if axis != "pipe"
    }
    return replace(prices_of(mesh), links=links)


def cluster_of(mesh: Mesh) -> Cluster:
    """The cluster that the mesh was made for, or the default one for its device type."""
    return mesh.cluster or default_cluster(mesh.device_type)


def _link(cluster: Cluster, mesh: Mesh, axis: str) -> Link:
    spread_over = spread(mesh, axis)
    return Link(latency_us(cluster, spread_over), bytes_per_us(cluster, spread_over))


def memory_of(device_type: str) -> float:
    """The bytes that a rank has for its tensors on a GPU; infinite on a CPU, whose memory ranks share."""
    return USABLE_OF_GPU * torch.cuda.get_device_properties().total_memory if device_type == "cuda" else math.inf
