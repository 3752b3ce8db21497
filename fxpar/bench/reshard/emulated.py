"""Resharding on emulated hosts, whose links have a known rate: measured times against the bound and each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fxpar.bench.hosts.emulated_cluster import EmulatedCluster
from fxpar.bench.measure.interleaved import (
    TRIES,
    Sample,
    agreed_share_of_others,
    all_disturbed,
    disturbance,
    meet_on_one_clock,
)
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.bench.reshard.problems import ReshardProblem, nine_cases, one_to_many
from fxpar.bench.reshard.transfers import Measured, TimedTransfer, measured, time_transfers
from fxpar.hardware.network import Network
from fxpar.resharding.cases import ONE_TO_MANY
from fxpar.resharding.strategies import STRATEGIES

NETWORK = Network(bytes_per_us=25.0, chunk_us=150.0)
"""200 Mbit/s, and the latency of a gloo message on two busy cores."""

NUM_ELEMENTS = 6_250_000
"""Elements of int32: one second of one link, of which latencies of some milliseconds are less than one percent."""

REPEATS = 5
"""The rates of emulated links vary by 3 to 5%; the median of five tolerates two bad ones."""

SECONDS_EACH = 5.0
"""Strategies other than broadcast, which have no goal, are repeated as often as fits into this time, at least once."""

GOAL_OVER_BOUND = 1.15
"""Headers take 4.4% of the rate, and a chain takes one more chunk per host; the rest is the variation of the links."""

GOAL_OVER_ONE_HOST = 1.1
"""A chain takes as long to many hosts as to one, except for one chunk per host."""


def emulate(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """The nine cases, then one device to many; some 7 minutes. The bars are of medians of broadcast."""
    for problem in nine_cases(NUM_ELEMENTS):
        say(f"case {problem.name} on emulated hosts")
        yield from rows(measure([problem]))
    say("from one device to many on emulated hosts")
    found = measure(one_to_many(NUM_ELEMENTS))
    yield from rows(found)
    yield _by_hosts(found)


@dataclass(frozen=True, slots=True)
class Emulated:
    """The result of one run on links of the rate of `network`."""

    transfers: Sequence[Measured]
    network: Network

    def broadcasts(self) -> dict[str, float]:
        """The median seconds of broadcast by case."""
        return {each.transfer.name: each.median_s for each in self.transfers if each.strategy == "broadcast"}


def measure(problems: Sequence[ReshardProblem], network: Network = NETWORK, tries: int = TRIES) -> Emulated:
    """Time all strategies of all problems, which have the same hosts, interleaved in one run of all ranks.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
        RankFailedError: a transfer failed, or did not deliver what was sent.
    """
    transfers = [_transfer(problem, strategy, network) for problem in problems for strategy in STRATEGIES]
    ranks_per_host = list(Counter(problems[0].hosts).values())
    with EmulatedCluster(len(ranks_per_host), rate_mbit=8 * network.bytes_per_us) as cluster:
        by_rank = cluster.run(ranks_per_host, time_on_one_clock, transfers, tries, timeout_s=900)
    return Emulated(measured(transfers, by_rank), network)


def _transfer(problem: ReshardProblem, strategy: str, network: Network) -> TimedTransfer:
    plan = problem.plan(strategy, network)
    fitting = int(SECONDS_EACH / (plan.time_us(network) / 1e6))
    repeats = REPEATS if strategy == "broadcast" else max(1, min(REPEATS, fitting))
    return TimedTransfer(problem.name, problem.shape, problem.source, problem.destination, plan, repeats)


def time_on_one_clock(transfers: Sequence[TimedTransfer], tries: int) -> list[list[Sample]]:
    """`time_transfers` on ranks that are all on this machine."""
    return time_transfers(transfers, torch.device("cpu"), meet_on_one_clock, agreed_share_of_others, tries)


def rows(found: Emulated) -> Iterator[tuple[Row, list[Bar]]]:
    """Times relative to the bound at the nominal rate, of which headers take 4.4%, and to broadcast in the same run."""
    broadcasts = found.broadcasts()
    for each in found.transfers:
        name, plan = each.transfer.name, each.transfer.plan
        bound_s = found.network.time_us(float(plan.bound_bytes)) / 1e6
        over_bound = each.median_s / bound_s
        row: Row = {
            "case": name,
            "strategy": each.strategy,
            "bound_s": bound_s,
            "predicted_s": plan.time_us(found.network) / 1e6,
            **each.times(),
            "median_over_bound": over_bound,
            "median_over_broadcast": each.median_s / broadcasts[name],
            **disturbance(each.timings),
        }
        disturbed = all_disturbed(each.timings)
        bar = at_most(f"case {name}: broadcast over bound", over_bound, GOAL_OVER_BOUND, disturbed=disturbed)
        yield row, [bar] if each.strategy == "broadcast" else []


def _by_hosts(found: Emulated) -> tuple[Row, list[Bar]]:
    """Times of broadcast by the number of receiving hosts, of two devices each."""
    broadcasts = found.broadcasts()
    meshes = {case.destination.mesh: case.name for case in ONE_TO_MANY}
    curve = {hosts: broadcasts[name] for (hosts, devices), name in meshes.items() if devices == 2}
    row: Row = {"strategy": "broadcast", **{f"to_{hosts}_hosts_s": median_s for hosts, median_s in curve.items()}}
    slowest = max(median_s / curve[1] for median_s in curve.values())
    name = f"broadcast to up to {max(curve)} hosts over one"
    disturbed = any(all_disturbed(each.timings) for each in found.transfers if each.strategy == "broadcast")
    return row, [at_most(name, slowest, GOAL_OVER_ONE_HOST, disturbed=disturbed)]
