"""The pipeline benchmark runs what it says: the schedules' actions, and every variant of a model."""

from collections.abc import Iterator, Mapping

import pytest

from fxpar.bench.measure.interleaved import Timing, timings_of_ranks
from fxpar.bench.pipeline.computing import computing_rows, rate_that_exposes
from fxpar.bench.pipeline.sleeping import (
    HIDING,
    MICROBATCHES,
    NETWORK,
    SCHEDULES,
    VARIANTS,
    Variant,
    exposing,
    sleeping_rows,
)
from fxpar.bench.pipeline.sleeping_step import Sleeping
from fxpar.bench.report import Bar, Row
from fxpar.schedule import DELAYED, SCHEDULE_NAMES, build_schedule
from fxpar.schedule.read_schedule import read_schedule
from fxpar.world.launch import run_ranks
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
    # Where communication takes as long as computation, messages of a filling pipe share links, too: that makes 1.5% of
    # two stages' step 14.7% of three's.
    assert 0 < fills_ms < 0.15 * makespan_ms, "besides, the pipe is filled and drained"


def test_signals_take_no_longer_than_a_message() -> None:
    costs = exposing(0.3, 2).costs(NETWORK, "signal")
    assert all(cost.time_us < 2 * NETWORK.chunk_us for cost in costs.transfers.values())


def _bars(found: Iterator[tuple[Row, list[Bar]]]) -> dict[str, Bar]:
    return {bar.name: bar for _, bars in found for bar in bars}


def _turns(seconds: Mapping[str, float]) -> dict[str, list[Timing]]:
    return {name: [Timing(took, others=0.0)] for name, took in seconds.items()}


def test_bars_are_met_by_what_is_predicted_and_missed_by_a_schedule_that_hides_nothing() -> None:
    model = exposing(0.3, 2)
    predicted = {str(v): v.predicted_ms(model) / 1e3 for v in VARIANTS["hidden"]}
    found = _bars(sleeping_rows("hidden", model, _turns(predicted)))
    assert len(found) == len(SCHEDULES) + 1 + len(HIDING)
    assert all(bar.met for bar in found.values()), found
    slow = dict.fromkeys(predicted, predicted["1f1b"])
    missed = _bars(sleeping_rows("hidden", model, _turns(slow)))
    assert not missed["2 sleeping stages: eager-1f1b over 1f1b, at least"].met
    assert not missed["2 sleeping stages, hidden, eager-1f1b: measured against predicted time, at most"].met


def test_each_schedule_is_held_against_the_signal_of_the_same_schedule() -> None:
    seconds = {str(v): 2.0 for v in VARIANTS["hidden"]} | {f"{name}, signal": 1.0 for name in SCHEDULES}
    seconds[f"{DELAYED}, signal"] = 1.5
    found = _bars(sleeping_rows("hidden", exposing(0.3, 4), _turns(seconds)))
    own = {name: found[f"4 sleeping stages: {name}, throughput of its own signal, at least"] for name in HIDING}
    assert {name: bar.value for name, bar in own.items()} == {"eager-1f1b": 0.5, DELAYED: 0.75, "zb-h2": 0.5}


def test_split_backwards_must_gain_what_is_promised_of_them() -> None:
    model = exposing(0.5, 2)
    promised = Variant("eager-1f1b").predicted_ms(model) / Variant(DELAYED).predicted_ms(model)
    assert promised > 1.08
    as_fast_as_eager = dict.fromkeys(map(str, VARIANTS["more"]), 1.0)
    bar = _bars(sleeping_rows("more", model, _turns(as_fast_as_eager)))[
        f"2 sleeping stages that communicate more: {DELAYED} over eager-1f1b, at least"
    ]
    assert bar.goal == pytest.approx(0.95 * promised)
    assert not bar.met


def test_every_variant_of_a_model_runs_and_links_have_a_rate_that_exposes_communication() -> None:
    assert rate_that_exposes(SMALL_GPT) > 0
    by_rank = run_ranks(2, run_small, SMALL_GPT)
    timings = timings_of_ranks([samples for samples, _ in by_rank])
    for _, compiled in by_rank:
        assert set(compiled) == {
            ("broadcast", "1f1b"),
            ("broadcast", "eager-1f1b"),
            ("broadcast", DELAYED),
            ("signal", "eager-1f1b"),
            ("signal", "actions"),
        }, "signals take no time, by which nothing would be delayed"
        schedule = read_schedule(compiled["signal", "actions"])
        assert (schedule.num_stages, schedule.num_microbatches) == (2, 2)
        assert str(schedule) == str(read_schedule(by_rank[0][1]["signal", "actions"])), "all ranks run the same"
    rows = list(computing_rows(SMALL_GPT, 200.0, timings))
    names = [row["variant"] for row, _ in rows[:-1]]
    assert names == ["torch, Schedule1F1B", "torch, eager order", *map(str, SMALL_GPT.variants)]
    _, bars = rows[-1]
    assert [bar.goal for bar in bars] == [1.1, 0.85, 0.85, 1.1, 1.0]
