"""`fxpar bench overlap`: how much communication overlaps with computation, as rules of overlap are added one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fxpar.bench.hosts.link_rate import Halves, measure_at, measure_halves, rate_that_takes_half
from fxpar.bench.measure.allocator import prepare_memory
from fxpar.bench.measure.claims import hold
from fxpar.bench.measure.interleaved import (
    TRIES,
    Sample,
    Timing,
    disturbance,
    median_ms,
    median_ratio,
    time_interleaved,
)
from fxpar.bench.overlap.cases import CASES, COMPUTE_ALONE, NO_OVERLAP, OverlapCase
from fxpar.bench.overlap.peers import DDP, FSDP2, best_of
from fxpar.bench.report import Bar, Report, Row, Say

HOSTS = 4
"""The fewest on which the axes x and z both have more than one rank; more would share two cores."""

WARM_UP, REPEATS = 2, 7
"""DDP rebuilds its buckets after its first step. The median of seven rounds tolerates three bad ones."""


def run(say: Say, mode: str = "here") -> Report:
    """All cases, on emulated hosts, or on ranks of this machine, where there is little to hide and no goal."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for case in CASES:
        rate_mbit = math.inf
        if mode == "emulate":
            say(f"{case.name}: how much it computes and sends")
            rate_mbit = rate_that_takes_half(HOSTS, halves_of, case)
        say(f"{case.name} {'on emulated hosts' if mode == 'emulate' else 'on this machine'}")
        for row, found in overlap_rows(case, rate_mbit, measure_at(rate_mbit, HOSTS, run_variants, case)):
            rows.append(row)
            bars += found if mode == "emulate" else []
    return Report(rows, bars)


def halves_of(case: OverlapCase) -> Halves:
    """Computing alone, and the bytes of a step without overlap. Every rank calls it."""
    prepare_memory()
    steps = case.steps()
    return measure_halves(steps[COMPUTE_ALONE], steps[NO_OVERLAP], WARM_UP, REPEATS)


def run_variants(
    case: OverlapCase, warm_up: int = WARM_UP, repeats: int = REPEATS, tries: int = TRIES
) -> Mapping[str, Sequence[Sample]]:
    """Time all variants and peers of the case. Every rank calls it."""
    prepare_memory()
    return time_interleaved(case.steps(), warm_up, repeats, tries)


def overlap_rows(
    case: OverlapCase, rate_mbit: float, timings: Mapping[str, Sequence[Timing]]
) -> Iterator[tuple[Row, list[Bar]]]:
    """The figures of every variant and peer, then the claims of the case and their bars."""
    alone_ms = median_ms(timings[COMPUTE_ALONE])
    for name, found in timings.items():
        row: Row = {
            "case": case.name,
            "rate_mbit": rate_mbit,
            "variant": name,
            "step_ms": median_ms(found),
            "exposed_communication_ms": median_ms(found) - alone_ms,
            "speed_up_over_no_overlap": median_ratio(timings, NO_OVERLAP, name),
            **disturbance(found),
        }
        yield row, []
    best = {peer: best_of(peer, timings) for peer in (DDP, FSDP2) if case.layers is not None}
    with_peers = {**timings, **{peer: timings[name] for peer, name in best.items()}}
    row, bars = hold("case", case.name, case.claims, with_peers)
    yield {**row, **{f"best {peer}": name for peer, name in best.items()}}, bars
