"""Fused ops on simulated GPUs: run by test_simulated.py in a process of its own, which interprets kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from fxpar.world.launch import PRELOADED, run_ranks
from tests.lowering.triton import mutations
from tests.lowering.triton.fused_on_simulated import (
    Case,
    GatherCase,
    ReduceCase,
    ScatterCase,
    buffers_asked_for,
    cases,
    run_fused_ops,
)

PRELOADED.append("tests.lowering.triton.mutations")

PULLED = GatherCase("rows", (16, 8), [16], segment_rows=4)
PUSHED = GatherCase("columns", (16, 8), [16], segment_rows=8, pushes=True)
BATCH = GatherCase("matrices", (2, 8, 8), [16])
SCATTERED = ScatterCase("matrices", (4, 8, 8), (4, 8, 16))
REDUCED = ReduceCase((16, 8), (8, 16))
SMALLEST = GatherCase("columns", (8, 8), [8], pushes=True)
SMALLEST_SCATTER = ScatterCase("rows", (4, 4), (4, 4))


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 1)])
def test_calls_one_after_another_give_what_they_are_by_definition(ranks: int, seed: int, tmp_path: Path) -> None:
    problems = run_ranks(ranks, run_fused_ops, tmp_path, seed, cases(ranks))
    assert problems == [[]] * ranks


def test_what_a_call_needs_is_prepared_once_for_each_half(tmp_path: Path) -> None:
    calls = [PULLED, PUSHED, SCATTERED, REDUCED, replace(PULLED, pushes=True), replace(PUSHED, pushes=False)]
    for first, second, third in run_ranks(2, buffers_asked_for, tmp_path, calls, 3):
        assert first > 0 and second > 0, "memory grows in the first round, and what was prepared is lost"
        assert third == 0


@pytest.mark.parametrize(
    ("mutation", "calls"),
    [
        (mutations.tiles_do_not_wait_for_rows, [PULLED, PUSHED, BATCH]),
        (mutations.tiles_wait_for_their_first_segment_only, [PULLED, PUSHED]),
        (mutations.sums_do_not_wait_for_pieces, [SCATTERED, REDUCED]),
        (mutations.counters_are_not_reset, 4 * [SMALLEST_SCATTER]),
        (mutations.shards_are_read_before_they_are_ready, [PULLED, REDUCED]),
        (mutations.copies_do_not_wait_for_the_kernels_before, [PULLED, PUSHED, REDUCED]),
        (mutations.results_do_not_wait_for_copies, [REDUCED]),
        (mutations.signals_overtake_copies, [PULLED, PUSHED]),
        (mutations.a_signal_is_left_out, [BATCH]),
        (mutations.signals_of_an_earlier_call_count, [PULLED, PULLED, PULLED, PULLED]),
        (mutations.all_calls_use_one_half, 4 * [SMALLEST]),
        (mutations.halves_overlap, 4 * [SMALLEST]),
    ],
)
def test_a_mistake_is_found(
    mutation: Callable[[], AbstractContextManager[None]], calls: list[Case], tmp_path: Path
) -> None:
    """Under some timing: each seed has delays of its own, and the threads of the ranks run as the machine lets them."""

    def is_found(seed: int) -> bool:
        folder = tmp_path / str(seed)
        folder.mkdir()
        return any(run_ranks(2, run_fused_ops, folder, seed, 3 * calls, mutation, 1.0))

    assert any(map(is_found, range(6)))
