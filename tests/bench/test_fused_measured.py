"""The benchmark of fused ops runs every way to compute a product, and says how much fusing hides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from fxpar.bench.fused.cases import BEST_MATMUL, CASES, COLLECTIVES, FUSED, GLOO, SEQUENCES, FusedCase, Goals
from fxpar.bench.fused.matmuls import MATMULS
from fxpar.bench.fused.run import fastest, gpu_bars, overlap_efficiency, summarise, time_rows
from fxpar.bench.measure.interleaved import Timing, timings_of_ranks
from fxpar.world.launch import run_ranks
from tests.bench.run_fused import compute, run_small

GATHER, SCATTER = (FusedCase(op, 24, 16, 8, Goals(1.1, 1.4, 0.85), calls=2, repeats=1) for op in ("gather", "scatter"))


def test_the_ways_that_gather_and_multiply_give_the_same() -> None:
    for found in run_ranks(2, compute, GATHER):
        assert found[FUSED].shape == (24, 4)
        for name in (BEST_MATMUL, GLOO):
            torch.testing.assert_close(found[name], found[FUSED])


def test_the_ways_that_multiply_and_scatter_give_the_pieces_of_the_sum() -> None:
    by_rank = run_ranks(2, compute, SCATTER)
    whole = by_rank[0][BEST_MATMUL] + by_rank[1][BEST_MATMUL]
    for sequence in (*SEQUENCES, FUSED):
        torch.testing.assert_close(torch.cat([found[sequence] for found in by_rank]), whole)


@pytest.mark.parametrize("case", [GATHER, SCATTER], ids=str)
def test_every_way_is_timed_and_held_against_the_goals(case: FusedCase) -> None:
    trials, timings = map(timings_of_ranks, zip(*run_ranks(2, run_small, case), strict=True))
    assert fastest(MATMULS, trials) in MATMULS
    rows = time_rows(case, math.inf, {**trials, **timings})
    assert [row["way"] for row in rows] == [*MATMULS, *timings]
    _, bars = summarise(case, MATMULS[0], timings)
    assert [bar.goal for bar in bars] == [1.1, 1.4, 0.85]


def turns_taking(seconds: Mapping[str, float]) -> dict[str, list[Timing]]:
    return {name: [Timing(took, others=0.0)] for name, took in seconds.items()}


SECONDS = {
    BEST_MATMUL: 2.0,
    COLLECTIVES[0]: 8.0,
    COLLECTIVES[1]: 4.0,
    SEQUENCES[0]: 10.0,
    SEQUENCES[1]: 6.0,
    FUSED: 5.0,
}


def test_efficiency_is_what_is_hidden_of_the_best_way_in_turn_beside_the_best_matmul() -> None:
    row, bars = summarise(SCATTER, MATMULS[0], turns_taking(SECONDS))
    assert row["efficiency"] == 1 - (5 - 2) / (6 - 2)
    effective = (row["effective_communication_in_turn_ms"], row["effective_communication_fused_ms"])
    assert effective == (4e3 / SCATTER.calls, 3e3 / SCATTER.calls)
    assert row["ceiling"] == 2 / 4, "a matmul of half the time hides half at most"
    assert [(bar.value, bar.met) for bar in bars] == [(2.5, False), (2.0, True), (0.25, False)]


def test_who_loses_by_fusing_is_told_so() -> None:
    assert overlap_efficiency(fused=4.0, in_turn=2.0) == -2
    assert overlap_efficiency(fused=1.0, in_turn=2.0) == 1
    assert math.isnan(overlap_efficiency(fused=1.0, in_turn=1.0)), "there was nothing to hide"


def test_what_has_no_goals_has_no_bars() -> None:
    _, bars = summarise(replace(SCATTER, goals=Goals()), MATMULS[0], turns_taking(SECONDS))
    assert bars == []


def test_between_hosts_all_cases_have_the_same_sizes() -> None:
    for op in ("gather", "scatter"):
        assert len({(case.m, case.k, case.n) for case in CASES["emulate"] if case.op == op}) == 1


def test_all_cases_divide_by_their_ranks() -> None:
    for case in (case for cases in CASES.values() for case in cases):
        assert not any(size % case.ranks for size in (case.m, case.k, case.n)), case


def test_a_gpu_is_held_to_its_goals_where_products_are_large() -> None:
    row = {"op": "gather", "k": 8, "n": 8, "kernel_over_library": 1.2, "efficiency": 0.46, "ceiling": 0.5}
    bars = gpu_bars([{**row, "m": 64}, {**row, "m": 4096}])
    assert [(bar.value, bar.met) for bar in bars] == [(1.2, False), (0.92, True)]
