"""Find the rate of links at which emulated hosts of one rank each communicate as long as they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.bench.hosts.emulated_cluster import DEVICE, EmulatedCluster
from fxpar.bench.hosts.namespace import bytes_sent
from fxpar.bench.measure.interleaved import Sample, Step, Timing, median_ms, time_interleaved, timings_of_ranks
from fxpar.world.launch import run_ranks

TRIAL_MBIT = 1000
"""The rate of the links on which sent bytes are counted; this machine can sustain it on as many links as are used."""


@dataclass(frozen=True, slots=True)
class Halves:
    """The computation of a rank, in samples of computing alone, and the bytes that it sends."""

    computing: Sequence[Sample]
    num_bytes: int


def measure_halves(computing: Step, sending: Step, warm_up: int, repeats: int) -> Halves:
    """Time `computing`, which sends nothing, and count the bytes of one run of `sending`. Every rank calls it."""
    samples = time_interleaved({"computing": computing}, warm_up, repeats)["computing"]
    sending()  # the first run compiles, and ranks exchange messages for that, too
    before = bytes_sent(DEVICE)
    sending()
    return Halves(samples, bytes_sent(DEVICE) - before)


def rate_that_takes_half(hosts: int, halves: Callable[..., Halves], *args: Any) -> float:
    """The rate of links between that many hosts of one rank each, in Mbit/s, at which both halves take equally long.

    Every rank calls `halves(*args)`.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    with EmulatedCluster(hosts, rate_mbit=TRIAL_MBIT) as cluster:
        by_rank = cluster.run(1, halves, *args, timeout_s=600)
    (computing,) = timings_of_ranks([{"computing": found.computing} for found in by_rank]).values()
    return 8 * max(found.num_bytes for found in by_rank) / (1e3 * median_ms(computing))


def measure_at(
    rate_mbit: float, hosts: int, samples: Callable[..., Mapping[str, Sequence[Sample]]], *args: Any
) -> dict[str, list[Timing]]:
    """The timings of `samples(*args)`, called on every rank, with one rank per emulated host and links of that rate.

    If the rate is infinite, all ranks are on this machine.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    if math.isinf(rate_mbit):
        return timings_of_ranks(run_ranks(hosts, samples, *args, timeout_s=600))
    with EmulatedCluster(hosts, rate_mbit=rate_mbit) as cluster:
        return timings_of_ranks(cluster.run(1, samples, *args, timeout_s=600))
