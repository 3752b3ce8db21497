"""`fxpar bench fused`: how much of a collective is hidden if it is fused with the matmul next to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fxpar.bench.fused.cases import (
    BEST_MATMUL,
    CASES,
    COLLECTIVES,
    FUSED,
    GLOO,
    SEQUENCES,
    FusedCase,
    overlap_efficiency,
)
from fxpar.bench.fused.matmuls import MATMULS
from fxpar.bench.hosts.link_rate import TRIAL_MBIT, Halves, measure_at, measure_halves, rate_that_takes_half
from fxpar.bench.measure.allocator import prepare_memory
from fxpar.bench.measure.interleaved import (
    TRIES,
    Sample,
    Timing,
    all_disturbed,
    disturbance,
    median_ms,
    median_ratio,
    time_interleaved,
)
from fxpar.bench.report import Bar, Report, Row, Say, at_least, at_most

WARM_UP = 2
"""Shared memory is allocated in the first call, and each of the first two calls is the first to use its buffer."""

TRIAL_REPEATS = 3
"""Repeats of the trials that choose the best matmul and the rate of links; no goal depends on them."""

LARGE_M, GPU_OF_LIBRARY, GPU_OF_CEILING = 4096, 1.10, 0.9
"""From that many rows on, FLUX's kernels hide most of what they can; smaller products are measured without a goal."""


def run(say: Say, mode: str = "here") -> Report:
    """All cases on ranks of this machine and on its GPU, if it has one; or on emulated hosts."""
    times: list[Row] = []
    summaries: list[Row] = []
    bars: list[Bar] = []
    for case in CASES[mode]:
        emulates = mode == "emulate"
        say(f"{case}: which matmul is the fastest")
        # A matmul uses no link, but its chunks depend on the hosts.
        trials = measure_at(TRIAL_MBIT if emulates else math.inf, case.ranks, time_matmuls, case)
        matmul = fastest(MATMULS, trials)
        rate_mbit = math.inf
        if emulates:
            say(f"{case}: how much it computes and sends")
            rate_mbit = rate_of_equals(case, matmul)
        say(f"{case} {'on emulated hosts' if emulates else 'on this machine'}")
        timings = measure_at(rate_mbit, case.ranks, run_variants, case, matmul)
        times += time_rows(case, rate_mbit, {**trials, **timings})
        summary, found = summarise(case, matmul, timings)
        summaries.append(summary)
        bars += found
    on_gpu = measure_on_gpu(say) if mode == "here" and torch.cuda.is_available() else []
    return Report([*times, *summaries, *on_gpu], [*bars, *gpu_bars(on_gpu)])


def measure_on_gpu(say: Say) -> list[Row]:
    """Fused kernels on the GPU of this process, as one of several ranks."""
    from fxpar.bench.fused.one_gpu import SHAPES, one_gpu_rows  # it needs Triton, which is there where GPUs are

    return one_gpu_rows(SHAPES, torch.bfloat16, say)


def gpu_bars(rows: Sequence[Row]) -> list[Bar]:
    """The goals for large matmuls: the time of the kernel alone, and the share of the hideable time that it hides."""
    bars = []
    for row in rows:
        if float(row["m"]) >= LARGE_M:
            name = f"on one GPU: {row['op']}, m={row['m']}, k={row['k']}, n={row['n']}"
            bars.append(at_most(f"{name}: kernel over library", float(row["kernel_over_library"]), GPU_OF_LIBRARY))
            of_ceiling = float(row["efficiency"]) / float(row["ceiling"])
            bars.append(at_least(f"{name}: efficiency of its ceiling", of_ceiling, GPU_OF_CEILING))
    return bars


def rate_of_equals(case: FusedCase, matmul: str) -> float:
    """The rate of links in Mbit/s at which the collective alone takes as long as the matmul alone.

    Messages take longer than their bytes alone. So a first rate is computed from the bytes, and corrected by the
    measured times at that rate.
    """
    by_bytes = rate_that_takes_half(case.ranks, halves_of, case, matmul)
    short = replace(case, repeats=TRIAL_REPEATS)
    timings = measure_at(by_bytes, case.ranks, run_variants, short, matmul, (BEST_MATMUL, *COLLECTIVES))
    return by_bytes * median_ratio(timings, fastest(COLLECTIVES, timings), BEST_MATMUL)


def halves_of(case: FusedCase, matmul: str) -> Halves:
    """The matmul alone, and of the collectives the one that sends less. Every rank calls it."""
    prepare_memory()
    steps = case.steps(case.ways(matmul))
    sending = next(steps[name] for name in reversed(COLLECTIVES) if name in steps)
    return measure_halves(steps[BEST_MATMUL], sending, WARM_UP, TRIAL_REPEATS)


def time_matmuls(case: FusedCase, warm_up: int = 1, tries: int = TRIES) -> Mapping[str, Sequence[Sample]]:
    """Time all matmuls, to find the best one. Every rank calls it."""
    prepare_memory()
    return time_interleaved(case.steps(case.matmuls()), warm_up, TRIAL_REPEATS, tries)


def run_variants(
    case: FusedCase, matmul: str, names: Sequence[str] | None = None, warm_up: int = WARM_UP, tries: int = TRIES
) -> Mapping[str, Sequence[Sample]]:
    """Time all ways with that matmul, or those of the given names that the case has. Every rank calls it."""
    prepare_memory()
    steps = {name: step for name, step in case.steps(case.ways(matmul)).items() if names is None or name in names}
    return time_interleaved(steps, warm_up, case.repeats, tries)


def time_rows(case: FusedCase, rate_mbit: float, timings: Mapping[str, Sequence[Timing]]) -> list[Row]:
    """The time of every way."""
    return [
        {
            "case": str(case),
            "rate_mbit": rate_mbit,
            "way": name,
            "ms": median_ms(found) / case.calls,
            **disturbance(found),
        }
        for name, found in timings.items()
    ]


def summarise(case: FusedCase, matmul: str, timings: Mapping[str, Sequence[Timing]]) -> tuple[Row, list[Bar]]:
    """The overlap efficiency of a case, whose best matmul is `matmul`, and the bars that it must reach.

    The effective communication time of a way is its time minus that of the best matmul alone. The efficiency is the
    share of that of the best sequential way that fusing hides: 1 if all is hidden, negative if fusing is slower. It is
    not possible to hide more than the matmul takes (Chang et al., FLUX, on overlap efficiency).
    """
    in_turn = fastest(SEQUENCES, timings)
    matmul_ms = median_ms(timings[BEST_MATMUL]) / case.calls

    def of_matmul(name: str) -> float:
        return median_ratio(timings, name, BEST_MATMUL)

    efficiency = overlap_efficiency(of_matmul(FUSED), of_matmul(in_turn))
    row: Row = {
        "fused": str(case),
        "best_matmul": matmul,
        "best_matmul_ms": matmul_ms,
        "effective_communication_in_turn_ms": (of_matmul(in_turn) - 1) * matmul_ms,
        "effective_communication_fused_ms": (of_matmul(FUSED) - 1) * matmul_ms,
        "efficiency": efficiency,
        "ceiling": min(1.0, 1 / of_matmul(fastest(COLLECTIVES, timings))),
    }
    disturbed = all_disturbed(timings[FUSED], timings[BEST_MATMUL], timings[in_turn])
    bars: list[Bar] = []
    if case.goals.of_matmul is not None:
        name = f"{case}: fused over matmul"
        bars.append(at_most(name, of_matmul(FUSED), case.goals.of_matmul, disturbed=disturbed))
    if case.goals.of_gloo is not None:
        of_gloo = median_ratio(timings, GLOO, FUSED)
        bars.append(at_least(f"{case}: {GLOO} over fused", of_gloo, case.goals.of_gloo, disturbed=disturbed))
    if case.goals.efficiency is not None:
        bars.append(at_least(f"{case}: efficiency", efficiency, case.goals.efficiency, disturbed=disturbed))
    return row, bars


def fastest(names: Sequence[str], timings: Mapping[str, Sequence[Timing]]) -> str:
    """The fastest of those ways in `names` that the case has."""
    return min((name for name in names if name in timings), key=lambda name: median_ms(timings[name]))
