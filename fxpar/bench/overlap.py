"""`fxpar bench overlap`: how much communication runs beside computation, with one rule of overlap after another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from fxpar.bench.allocator import keep_freed_memory
from fxpar.bench.claims import hold
from fxpar.bench.cluster import DEVICE, EmulatedCluster
from fxpar.bench.namespace import bytes_sent
from fxpar.bench.overlap_cases import CASES, COMPUTE_ALONE, NO_OVERLAP, Case
from fxpar.bench.pipeline_sleeping import MOST_OTHERS
from fxpar.bench.report import Bar, Report, Row, Say
from fxpar.bench.turns import Sample, Turn, median_ms, median_ratio, take_turns, turns_of
from fxpar.launch import run_ranks

HOSTS = 4
WARM_UP, REPEATS = 2, 7

_TRIAL_MBIT = 1000
"""Of the links over which sent bytes are counted; that many links of this machine hold it."""


def run(say: Say, mode: str = "here") -> Report:
    """All cases, on emulated hosts, or on ranks of this machine, where there is little to hide and no goal."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for case in CASES:
        rate_mbit = math.inf
        if mode == "emulate":
            say(f"{case.name}: how much it computes and sends")
            rate_mbit = rate_that_takes_half(case)
        say(f"{case.name} {'on emulated hosts' if mode == 'emulate' else 'on this machine'}")
        for row, found in overlap_rows(case, rate_mbit, measure(case, rate_mbit)):
            rows.append(row)
            bars += found if mode == "emulate" else []
    return Report(rows, bars)


def rate_that_takes_half(case: Case) -> float:
    """The rate of links, in Mbit/s, at which what a step without overlap sends takes as long as what it computes.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    with EmulatedCluster(HOSTS, rate_mbit=_TRIAL_MBIT) as cluster:
        by_rank = cluster.run(1, run_parts, case, timeout_s=600)
    (computing,) = turns_of([samples for samples, _ in by_rank]).values()
    return 8 * max(sent for _, sent in by_rank) / (1e3 * median_ms(computing))


def run_parts(case: Case) -> tuple[Mapping[str, Sequence[Sample]], int]:
    """What each rank does: samples of computing alone, and the bytes that it sends in a step that overlaps nothing."""
    _prepare_memory()
    steps = case.steps()
    computing = take_turns({COMPUTE_ALONE: steps[COMPUTE_ALONE]}, WARM_UP, REPEATS)
    steps[NO_OVERLAP]()  # compiled now, for which ranks talk, too
    before = bytes_sent(DEVICE)
    steps[NO_OVERLAP]()
    return computing, bytes_sent(DEVICE) - before


def measure(case: Case, rate_mbit: float) -> dict[str, list[Turn]]:
    """All variants and peers in turns, on hosts with links of that rate, or on this machine if it is infinite.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    if math.isinf(rate_mbit):
        return turns_of(run_ranks(HOSTS, run_variants, case, timeout_s=600))
    with EmulatedCluster(HOSTS, rate_mbit=rate_mbit) as cluster:
        return turns_of(cluster.run(1, run_variants, case, timeout_s=600))


def run_variants(case: Case, warm_up: int = WARM_UP, repeats: int = REPEATS) -> Mapping[str, Sequence[Sample]]:
    """What each rank does."""
    _prepare_memory()
    return take_turns(case.steps(), warm_up, repeats)


def _prepare_memory() -> None:
    keep_freed_memory()
    torch.set_flush_denormal(True)  # what is left in memory that nothing was received into may be slow to multiply


def overlap_rows(
    case: Case, rate_mbit: float, turns: Mapping[str, Sequence[Turn]]
) -> Iterator[tuple[Row, list[Bar]]]:
    """The figures of every variant and peer, then what they must show."""
    alone_ms = median_ms(turns[COMPUTE_ALONE])
    for name, found in turns.items():
        row: Row = {
            "case": case.name,
            "rate_mbit": rate_mbit,
            "variant": name,
            "step_ms": median_ms(found),
            "exposed_communication_ms": median_ms(found) - alone_ms,
            "speed_up_over_no_overlap": median_ratio(turns, NO_OVERLAP, name, MOST_OTHERS),
            "processors_of_others": statistics.median(turn.others for turn in found),
        }
        yield row, []
    yield hold("case", case.name, case.claims, turns, MOST_OTHERS)
