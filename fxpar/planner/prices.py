"""What things cost, in microseconds: the prices by which layouts, stages and meshes are weighed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxpar.passes.moves import StepKind
from fxpar.resharding.network import LOOPBACK, Network


@dataclass(frozen=True, slots=True)
class Link:
    """The network along one mesh axis: what every collective costs, and how fast a rank sends."""

    latency_us: float
    bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one rank's work and of what ranks send each other.

    `saved_us_per_byte` is paid for values kept from forward to backward, `stored_us_per_byte` for parameters; both
    stand for memory that runs out rather than for time. `reduce_scatter_factor` is how many times the bytes of a
    ring's reduce-scatter are really sent: 2 where it is an all-reduce underneath. A rank takes its piece of an edge
    between stages in at `edge_bytes_per_us`; before, the edge passes the `network` between their hosts.
    """

    links: Mapping[str, Link]
    edge_bytes_per_us: float
    flops_per_us: float
    memory_bytes_per_us: float
    saved_us_per_byte: float
    stored_us_per_byte: float
    reduce_scatter_factor: float = 1.0
    network: Network = LOOPBACK

    def move_us(self, kind: StepKind, axis: str, bytes_sent: float, bytes_kept: float) -> float:
        """The time of one change of placement along `axis`.

        It is a collective in which each rank sends `bytes_sent`, or a slice that leaves `bytes_kept`.
        """
        if kind is StepKind.SLICE:
            return 2 * bytes_kept / self.memory_bytes_per_us
        factor = self.reduce_scatter_factor if kind is StepKind.REDUCE_SCATTER else 1.0
        link = self.links[axis]
        return link.latency_us + factor * bytes_sent / link.bytes_per_us

    def bucketed_us(self, axis: str, bytes_sent: float) -> float:
        """The time of sending bytes along `axis` in company, so that the latency of a collective is not theirs."""
        return bytes_sent / self.links[axis].bytes_per_us


_CPU = Prices(
    links={axis: Link(latency_us=500.0, bytes_per_us=2e3) for axis in ("y", "x")},
    edge_bytes_per_us=2e3,
    flops_per_us=5e4,
    memory_bytes_per_us=1e4,
    saved_us_per_byte=1e-5,
    stored_us_per_byte=1e-5,
    reduce_scatter_factor=2.0,  # gloo's reduce_scatter moves as many bytes as its all_reduce
)
_CUDA = Prices(
    links={axis: Link(latency_us=15.0, bytes_per_us=2e5) for axis in ("y", "x")},
    edge_bytes_per_us=2e5,
    flops_per_us=3e8,
    memory_bytes_per_us=2e6,
    saved_us_per_byte=1e-6,
    stored_us_per_byte=1e-6,
    network=Network(bytes_per_us=2.5e4, chunk_us=20.0),
)


def memory_of(device_type: str) -> float:
    """The bytes that a rank has for its tensors: a GPU's memory; on a CPU, which ranks share, it is not known."""
    return torch.cuda.get_device_properties().total_memory if device_type == "cuda" else math.inf


def default_prices(device_type: str) -> Prices:
    """Typical prices: of processes on one CPU host over gloo, or of GPUs on NVLink with 200 Gbit/s between hosts."""
    return _CUDA if device_type == "cuda" else _CPU
