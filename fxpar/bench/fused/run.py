"""`fxpar bench fused`: how much of a collective a matmul beside it hides, where both are one op."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fxpar.bench.fused.cases import BEST_MATMUL, CASES, COLLECTIVES, FUSED, GLOO, SEQUENCES, Case, overlap_efficiency
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
"""Shared memory grows in the first call, and the second is the first that finds both of its buffers there."""

TRIAL_REPEATS = 3
"""Of what decides on the best matmul and the rate of links, not on a goal."""

LARGE_M, GPU_OF_LIBRARY, GPU_OF_CEILING = 4096, 1.10, 0.9
"""From so many rows on, FLUX's kernels hide most of what they can; smaller ones are measured without a goal."""


def run(say: Say, mode: str = "here") -> Report:
    """All cases on ranks of this machine and on its GPU, if it has one; or on emulated hosts."""
    times: list[Row] = []
    summaries: list[Row] = []
    bars: list[Bar] = []
    for case in CASES[mode]:
        emulates = mode == "emulate"
        say(f"{case}: which matmul is the fastest")
        # No link is used by a matmul; but chunks depend on the hosts.
        trials = measure_at(TRIAL_MBIT if emulates else math.inf, case.ranks, time_matmuls, case)
        matmul = fastest(MATMULS, trials)
        rate_mbit = math.inf
        if emulates:
            say(f"{case}: how much it computes and sends")
            rate_mbit = rate_of_equals(case, matmul)
        say(f"{case} {'on emulated hosts' if emulates else 'on this machine'}")
        timings = measure_at(rate_mbit, case.ranks, run_ways, case, matmul)
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
    """Where the matmul is large enough to be worth it: the kernel alone, and the share that it hides of what it can."""
    bars = []
    for row in rows:
        if float(row["m"]) >= LARGE_M:
            name = f"on one GPU: {row['op']}, m={row['m']}, k={row['k']}, n={row['n']}"
            bars.append(at_most(f"{name}: kernel over library", float(row["kernel_over_library"]), GPU_OF_LIBRARY))
            of_ceiling = float(row["efficiency"]) / float(row["ceiling"])
            bars.append(at_least(f"{name}: efficiency of its ceiling", of_ceiling, GPU_OF_CEILING))
    return bars


def rate_of_equals(case: Case, matmul: str) -> float:
    """The rate of links in Mbit/s at which the collective alone takes as long as the matmul alone.

    Messages take longer than their bytes do on a link: what they take at the rate by bytes corrects it.
    """
    by_bytes = rate_that_takes_half(case.ranks, halves_of, case, matmul)
    short = replace(case, repeats=TRIAL_REPEATS)
    timings = measure_at(by_bytes, case.ranks, run_ways, short, matmul, (BEST_MATMUL, *COLLECTIVES))
    return by_bytes * median_ratio(timings, fastest(COLLECTIVES, timings), BEST_MATMUL)


def halves_of(case: Case, matmul: str) -> Halves:
    """The matmul alone, and the collective alone that sends less. On each rank."""
    prepare_memory()
    steps = case.steps(case.ways(matmul))
    sending = next(steps[name] for name in reversed(COLLECTIVES) if name in steps)
    return measure_halves(steps[BEST_MATMUL], sending, WARM_UP, TRIAL_REPEATS)


def time_matmuls(case: Case, warm_up: int = 1, tries: int = TRIES) -> Mapping[str, Sequence[Sample]]:
    """What each rank does to find the best matmul."""
    prepare_memory()
    return time_interleaved(case.steps(case.matmuls()), warm_up, TRIAL_REPEATS, tries)


def run_ways(
    case: Case, matmul: str, names: Sequence[str] | None = None, warm_up: int = WARM_UP, tries: int = TRIES
) -> Mapping[str, Sequence[Sample]]:
    """What each rank does: all ways with that matmul, or those of these names that the case has."""
    prepare_memory()
    steps = {name: step for name, step in case.steps(case.ways(matmul)).items() if names is None or name in names}
    return time_interleaved(steps, warm_up, case.repeats, tries)


def time_rows(case: Case, rate_mbit: float, timings: Mapping[str, Sequence[Timing]]) -> list[Row]:
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


def summarise(case: Case, matmul: str, timings: Mapping[str, Sequence[Timing]]) -> tuple[Row, list[Bar]]:
    """The overlap efficiency of a case, whose best matmul is `matmul`, and the bars that it must reach.

    It is what fusing hides of the effective communication time (what a way takes besides the best unsplit matmul) of
    the best way that does one after the other: 1 where all is hidden, negative where fusing loses. At most all that
    the matmul has time for can be hidden (Chang et al., FLUX, on overlap efficiency).
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
    """Of the ways `names`, those that the case has, the fastest."""
    return min((name for name in names if name in timings), key=lambda name: median_ms(timings[name]))
