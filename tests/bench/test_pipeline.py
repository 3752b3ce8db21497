"""The pipeline benchmark runs what it says: the schedules' actions, and every variant of a model."""

from collections.abc import Iterator

import pytest

from fxpar.bench.pipeline_computing import computing_rows, rate_that_exposes
from fxpar.bench.pipeline_sleeping import MICROBATCHES, NETWORK, SCHEDULES, VARIANTS, Variant, exposing, sleeping_rows
from fxpar.bench.report import Bar, Row
from fxpar.bench.sleeping import Sleeping
from fxpar.bench.turns import Turn, turns_of
from fxpar.launch import run_ranks
from fxpar.schedule import SCHEDULE_NAMES, build_schedule
from tests.bench.run_pipelines import SMALL_GPT, run_small, sleep_through

QUICK = Sleeping(2, num_bytes=400, forward_ms=1, input_gradients_ms=1, weight_gradients_ms=1)


@pytest.mark.parametrize("strategy", ["broadcast", "signal"])
def test_sleeping_stages_run_the_actions_of_their_schedule(strategy: str) -> None:
    schedules = [build_schedule(name, 2, 3) for name in SCHEDULE_NAMES]
    for rank, done in enumerate(run_ranks(2, sleep_through, QUICK, schedules, strategy)):
        assert done == [[str(action) for action in schedule.ranks[rank]] for schedule in schedules]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("share", [0.2, 0.3, 0.5])
def test_exposed_communication_is_the_share_of_a_1f1b_step_that_was_asked_for(share: float, num_stages: int) -> None:
    model = exposing(share, num_stages)
    makespan_ms = Variant("1f1b").predicted_ms(model)
    computed_ms = sum(model.compute_us[kind] for kind in "FB") / 1e3 * MICROBATCHES
    fills_ms = makespan_ms - computed_ms / (1 - share)
    assert 0 < fills_ms < 0.1 * makespan_ms, "besides, the pipe is filled and drained"


def test_signals_take_no_longer_than_a_message() -> None:
    costs = exposing(0.3, 2).costs(NETWORK, "signal")
    assert all(cost.time_us < 2 * NETWORK.chunk_us for cost in costs.transfers.values())


def _met(found: Iterator[tuple[Row, list[Bar]]]) -> dict[str, bool]:
    return {bar.name: bar.met for _, bars in found for bar in bars}


def test_bars_are_met_by_what_is_predicted_and_missed_by_a_schedule_that_hides_nothing() -> None:
    model = exposing(0.3, 2)
    predicted = {str(v): [Turn(v.predicted_ms(model) / 1e3, others=0.0)] for v in VARIANTS}
    met = _met(sleeping_rows("hidden", model, predicted))
    assert len(met) == len(SCHEDULES) + 2
    assert all(met.values()), met
    slow = {name: [Turn(predicted["1f1b"][0].seconds, others=0.0)] for name in predicted}
    missed = _met(sleeping_rows("hidden", model, slow))
    assert not missed["2 sleeping stages: eager-1f1b over 1f1b, at least"]
    assert not missed["2 sleeping stages, hidden, eager-1f1b: measured against predicted time, at most"]


def test_every_variant_of_a_model_runs_and_links_have_a_rate_that_exposes_communication() -> None:
    assert rate_that_exposes(SMALL_GPT) > 0
    turns = turns_of(run_ranks(2, run_small, SMALL_GPT))
    rows = list(computing_rows(SMALL_GPT, 200.0, turns))
    names = [row["variant"] for row, _ in rows[:-1]]
    assert names == ["torch, Schedule1F1B", "torch, eager order", *map(str, SMALL_GPT.variants)]
    _, bars = rows[-1]
    assert [bar.goal for bar in bars] == [1.1, 1.0, 1.0]
