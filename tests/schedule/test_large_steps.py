"""Steps of 64 stages and 512 microbatches are checked and simulated in seconds of the processor's time."""

from __future__ import annotations

import time

from fxpar.schedule import Costs, TransferCost, build_schedule, chain, check_programs, lower, simulate

STAGES, MICROBATCHES = 64, 512

MOST_SECONDS = 10.0


def test_a_large_step_is_checked_and_simulated_in_seconds() -> None:
    schedule, edges = build_schedule("eager-1f1b", STAGES, MICROBATCHES), chain(STAGES)
    programs = lower(schedule, edges)
    begin = time.process_time()
    check_programs(programs, schedule, edges)
    checked = time.process_time()
    makespan_us = simulate(programs, _costs()).makespan_us
    simulated = time.process_time()
    assert checked - begin < MOST_SECONDS
    assert simulated - checked < MOST_SECONDS
    # Of a chain that hides its communication: a period for each microbatch, and the way there and back.
    assert 3 * MICROBATCHES <= makespan_us <= 3 * MICROBATCHES + (3 + 2) * STAGES


def _costs() -> Costs:
    """A forward takes 1, a backward 2, and a message 0.5 of the interfaces of both hosts."""
    transfers = {
        (f"out{first}", source, (target,)): TransferCost(0.5, {f"{source} sends": 0.5, f"{target} receives": 0.5})
        for first in range(STAGES - 1)
        for source, target in ((first, first + 1), (first + 1, first))
    }
    times = {stage: {"F": 1.0, "B": 2.0} for stage in range(STAGES)}
    return Costs(tuple(range(STAGES)), chain(STAGES), times, transfers)
