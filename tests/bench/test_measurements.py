"""The quick measurements run and give their figures; how large those are is for `fxpar bench`, not for tests."""

import pytest

from fxpar.bench.measure.interleaved import Timing
from fxpar.bench.step.compile_time import compile_rows
from fxpar.bench.step.executor_overhead import executor_overhead
from fxpar.bench.step.layout_search import search_layouts


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_layouts_are_searched_over_the_joint_graph_of_a_whole_model(model: str) -> None:
    row, (timing,) = search_layouts(model, layers=1, repeats=1, tries=1)
    assert row["model"] == model
    assert int(row["operations"]) > 200, "the graph has forward and backward"
    assert timing.seconds > 0


def test_executor_overhead_counts_every_instruction_of_a_program() -> None:
    (busy, bar_of_busy), (clock, bar_of_clock) = executor_overhead(lambda text: None, steps=1, repeats=1, tries=1)
    computes_and_frees, sends_and_completions, posts_and_waits, reductions = 2 * 2 * 64, 2 * 64, 2 * 64, 1
    assert busy["instructions"] == computes_and_frees + sends_and_completions + posts_and_waits + reductions
    assert 0 < float(busy["us_per_instruction"]) == bar_of_busy.value
    assert bar_of_busy.value < float(clock["us_per_instruction"]) == bar_of_clock.value


def test_compilers_are_compared_round_by_round_and_disturbed_rounds_do_not_count() -> None:
    quiet, loud = 0.0, 1.0
    timings = {
        "fxpar": [Timing(30.0, quiet), Timing(90.0, loud, 2), Timing(40.0, quiet)],
        "inductor": [Timing(20.0, quiet), Timing(20.0, quiet), Timing(20.0, quiet)],
    }
    (ours, no_bar), (theirs, bar) = compile_rows(timings)
    assert (ours["compile_s"], ours["ranks"], ours["disturbed_rounds"]) == (35.0, 4, 1)
    assert (theirs["compile_s"], theirs["ranks"]) == (20.0, 1)
    assert no_bar is None and bar is not None
    assert (bar.value, bar.met, bar.disturbed) == (1.75, False, False)
