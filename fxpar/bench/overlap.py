"""`fxpar bench overlap`: how much communication runs beside computation, with one rule of overlap after another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from fxpar.bench.allocator import keep_freed_memory
from fxpar.bench.claims import hold
from fxpar.bench.cluster import EmulatedCluster
from fxpar.bench.overlap_cases import CASES, COMPUTE_ALONE, NO_OVERLAP, Case
from fxpar.bench.pipeline_sleeping import MOST_OTHERS
from fxpar.bench.report import Bar, Report, Row, Say
from fxpar.bench.turns import Sample, Turn, median_ms, median_ratio, take_turns, turns_of
from fxpar.launch import run_ranks

HOSTS = 4
WARM_UP, REPEATS = 2, 7


def run(say: Say, mode: str = "here") -> Report:
    """All cases, on emulated hosts, or on ranks of this machine, where there is little to hide and no goal."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for case in CASES:
        say(f"{case.name} {'on emulated hosts' if mode == 'emulate' else 'on this machine'}")
        for row, found in overlap_rows(case, measure(case, emulate=mode == "emulate")):
            rows.append(row)
            bars += found if mode == "emulate" else []
    return Report(rows, bars)


def measure(case: Case, *, emulate: bool) -> dict[str, list[Turn]]:
    """All variants and peers in turns.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    if not emulate:
        return turns_of(run_ranks(HOSTS, run_variants, case, timeout_s=600))
    with EmulatedCluster(HOSTS, rate_mbit=case.rate_mbit) as cluster:
        return turns_of(cluster.run(1, run_variants, case, timeout_s=600))


def run_variants(case: Case, warm_up: int = WARM_UP, repeats: int = REPEATS) -> Mapping[str, Sequence[Sample]]:
    """What each rank does."""
    keep_freed_memory()
    torch.set_flush_denormal(True)  # what is left in memory that nothing was received into may be slow to multiply
    return take_turns(case.steps(), warm_up, repeats)


def overlap_rows(case: Case, turns: Mapping[str, Sequence[Turn]]) -> Iterator[tuple[Row, list[Bar]]]:
    """The figures of every variant and peer, then what they must show."""
    alone_ms = median_ms(turns[COMPUTE_ALONE])
    for name, found in turns.items():
        row: Row = {
            "case": case.name,
            "rate_mbit": case.rate_mbit,
            "variant": name,
            "step_ms": median_ms(found),
            "exposed_communication_ms": median_ms(found) - alone_ms,
            "speed_up_over_no_overlap": median_ratio(turns, NO_OVERLAP, name, MOST_OTHERS),
            "processors_of_others": statistics.median(turn.others for turn in found),
        }
        yield row, []
    yield hold("case", case.name, case.claims, turns, MOST_OTHERS)
