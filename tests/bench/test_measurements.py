"""The quick measurements run and give their figures; how large those are is for `fxpar bench`, not for tests."""

import pytest

from fxpar.bench.executor_overhead import executor_overhead
from fxpar.bench.layout_search import search_layouts
from fxpar.bench.models import example


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_layouts_are_searched_over_the_joint_graph_of_a_whole_model(model: str) -> None:
    row = search_layouts(model, layers=1, repeats=1)
    assert row["model"] == model
    assert row["operations"] > 200, "the graph has forward and backward"
    assert row["propagate_layouts_s"] > 0


def test_executor_overhead_counts_every_instruction_of_a_program() -> None:
    ((row, bar),) = executor_overhead(lambda text: None)
    computes_and_frees, sends_and_completions, posts_and_waits, reductions = 2 * 2 * 64, 2 * 64, 2 * 64, 1
    assert row["instructions"] == computes_and_frees + sends_and_completions + posts_and_waits + reductions
    assert 0 < row["busy_us_per_instruction"] == bar.value


def test_an_example_that_does_not_exist_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"has no no_such_example.py: run this from a clone"):
        example("no_such_example")
