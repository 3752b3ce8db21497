"""Schedules of sleeping stages on emulated hosts: how much communication each hides, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxpar.bench.hosts.emulated_cluster import EmulatedCluster
from fxpar.bench.measure.interleaved import (
    TRIES,
    Sample,
    Timing,
    all_disturbed,
    disturbance,
    median_ms,
    median_ratio,
    time_interleaved,
    timings_of_ranks,
)
from fxpar.bench.pipeline.sleeping_step import Sleeping
from fxpar.bench.report import Bar, Row, Say, at_least, at_most
from fxpar.hardware.network import Network
from fxpar.resharding.strategies import SIGNAL
from fxpar.schedule import DELAYED, Schedule, build_schedule, chain, lower, simulate

RATE_MBIT = 200.0
"""The emulation holds this rate within 5% for up to sixteen processes on two cores; a gigabit only for eight."""

NETWORK = Network(bytes_per_us=RATE_MBIT / 8 * 0.956, chunk_us=150.0)
"""The rate that TCP leaves to the payload, and the latency of a gloo message on two busy cores."""

MICROBATCHES = 32
"""Filling the pipeline of S stages costs eager-1F1B a time of 2 c (S - 1), with c of communication. If that is to be 3%
of a step whose slowest stage takes P per microbatch, 2 c (S - 1) / (0.03 P) microbatches are needed: 30 for two stages
with the share below."""

WARM_UP, REPEATS = 1, 4
"""The first step opens connections. Sleeping stages vary by less than 1% between rounds: four can resolve 3%."""

EXPOSED, MORE_EXPOSED = 0.3, 0.5
"""The share of exposed communication in a 1F1B step. eager-1F1B can hide C = P/2, a third of P + C, which is just above
0.3 with filling and draining; at one half it cannot hide all."""

SCHEDULES = ("1f1b", "eager-1f1b", DELAYED, "zb-h1", "zb-h2")
HIDING = ("eager-1f1b", DELAYED, "zb-h2")
"""The schedules that are meant to hide communication of the share `EXPOSED`."""

SPLITTING = (DELAYED, "zb-h2")
"""The schedules that hide more than eager-1F1B, by splitting the backward."""

GOAL_SPEED_UP = 1.3
"""The speed-up of eager-1F1B over 1F1B. The simulator predicts 1.36 to 1.38."""

GOAL_OF_PROMISED_SIGNAL = 0.99
"""The throughput of a schedule relative to its own signal, in units of the predicted ratio (0.95 to 0.98, since
pipelines fill and drain)."""

GOAL_PREDICTION = 0.05
"""How far times may be from predicted ones, and how far speed-ups may be below predicted ones if these are above 1."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A schedule, and the strategy of transfers."""

    schedule: str
    strategy: str = "broadcast"

    def __str__(self) -> str:
        return self.schedule if self.strategy == "broadcast" else f"{self.schedule}, {self.strategy}"

    def built(self, model: Sleeping) -> Schedule:
        """The schedule for `model`."""
        delays = model.costs(NETWORK).weight_delays(MICROBATCHES) if self.schedule == DELAYED else None
        return build_schedule(self.schedule, model.num_stages, MICROBATCHES, delays=delays)

    def predicted_ms(self, model: Sleeping) -> float:
        """The simulated time of a step."""
        programs = lower(self.built(model), chain(model.num_stages))
        return simulate(programs, model.costs(NETWORK, self.strategy)).makespan_us / 1e3


VARIANTS = {
    "hidden": (*(Variant(name) for name in SCHEDULES), *(Variant(name, SIGNAL) for name in SCHEDULES)),
    "more": tuple(Variant(name) for name in SCHEDULES),
}
"""By the amount of communication: each schedule, and its own signal if it has to reach that."""


def sleeping(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """Two and four stages, with as much communication as eager-1F1B can hide, then with more."""
    for num_stages in (2, 4):
        model = exposing(EXPOSED, num_stages)
        say(f"{num_stages} sleeping stages on emulated hosts")
        yield from sleeping_rows("hidden", model, measure("hidden", model))
    for num_stages in (2, 4):
        model = exposing(MORE_EXPOSED, num_stages)
        say(f"{num_stages} sleeping stages that communicate more than eager-1F1B can hide")
        yield from sleeping_rows("more", model, measure("more", model))


def exposing(share: float, num_stages: int) -> Sleeping:
    """Stages whose 1F1B step consists of communication by that `share`.

    A microbatch takes P + C (S - 1) / S, with P of computation and C of communication there and back.
    """
    compute_us = sum(Sleeping(num_stages, 0).compute_us[kind] for kind in ("F", "B"))
    both_ways_us = compute_us * share / (1 - share) * num_stages / (num_stages - 1)
    one_way_us = both_ways_us / 2 - NETWORK.chunk_us
    return Sleeping(num_stages, int(one_way_us * NETWORK.bytes_per_us) // 4 * 4)


def measure(case: str, model: Sleeping) -> dict[str, list[Timing]]:
    """All variants of a case, each stage on a host of its own.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    with EmulatedCluster(model.num_stages, rate_mbit=RATE_MBIT) as cluster:
        return timings_of_ranks(cluster.run(1, run_variants, case, model, timeout_s=900))


def run_variants(
    case: str, model: Sleeping, warm_up: int = WARM_UP, repeats: int = REPEATS, tries: int = TRIES
) -> Mapping[str, Sequence[Sample]]:
    """Time all variants of a case. Every rank calls it."""
    steps = {str(v): model.executor(v.built(model), NETWORK, v.strategy) for v in VARIANTS[case]}
    return time_interleaved(steps, warm_up, repeats, tries)


def sleeping_rows(
    case: str, model: Sleeping, timings: Mapping[str, Sequence[Timing]]
) -> Iterator[tuple[Row, list[Bar]]]:
    """Every variant's figures, then the comparison of the case: "hidden" against signals, "more" against eager-1F1B."""
    for variant in VARIANTS[case]:
        measured, predicted = median_ms(timings[str(variant)]), variant.predicted_ms(model)
        row: Row = {
            "sleeping stages": model.num_stages,
            "communication": case,
            "variant": str(variant),
            "step_ms": measured,
            "predicted_ms": predicted,
            "measured_over_predicted": measured / predicted,
            "speed_up_over_1f1b": median_ratio(timings, "1f1b", str(variant)),
            **disturbance(timings[str(variant)]),
        }
        name = f"{model.num_stages} sleeping stages, {case}, {variant}: measured against predicted time"
        error, disturbed = abs(measured / predicted - 1), all_disturbed(timings[str(variant)])
        bar = at_most(name, error, GOAL_PREDICTION, disturbed=disturbed)
        yield row, [bar] if variant.strategy != SIGNAL else []
    yield _against_signals(model, timings) if case == "hidden" else _further_gains(model, timings)


def _against_signals(model: Sleeping, timings: Mapping[str, Sequence[Timing]]) -> tuple[Row, list[Bar]]:
    """How much communication each schedule hides: its time against that of the same schedule with strategy "signal"."""
    where = f"{model.num_stages} sleeping stages"
    row: dict[str, str | int | float | bool] = {"sleeping stages": model.num_stages}
    bars = [_bar(f"{where}: eager-1f1b over 1f1b", timings, Variant("eager-1f1b"), Variant("1f1b"), GOAL_SPEED_UP)]
    for name in SCHEDULES:
        schedule, signal = Variant(name), Variant(name, SIGNAL)
        promised = signal.predicted_ms(model) / schedule.predicted_ms(model)
        row[f"{name}_of_its_signal"] = median_ratio(timings, str(signal), str(schedule))
        row[f"{name}_promised"] = promised
        if name in HIDING:
            goal = GOAL_OF_PROMISED_SIGNAL * promised
            bars.append(_bar(f"{where}: {name}, throughput of its own signal", timings, schedule, signal, goal))
    return row, bars


def _further_gains(model: Sleeping, timings: Mapping[str, Sequence[Timing]]) -> tuple[Row, list[Bar]]:
    """The speed-up of split backwards over eager-1F1B, measured and predicted."""
    row: dict[str, str | int | float | bool] = {"sleeping stages": model.num_stages}
    bars = []
    eager = Variant("eager-1f1b")
    for name in SPLITTING:
        splitting = Variant(name)
        promised = eager.predicted_ms(model) / splitting.predicted_ms(model)
        row[f"{name}_over_eager"] = median_ratio(timings, str(eager), name)
        row[f"{name}_promised"] = promised
        where = f"{model.num_stages} sleeping stages that communicate more: {name} over eager-1f1b"
        bars.append(_bar(where, timings, splitting, eager, max(1.0, (1 - GOAL_PREDICTION) * promised)))
    return row, bars


def _bar(name: str, timings: Mapping[str, Sequence[Timing]], faster: Variant, slower: Variant, goal: float) -> Bar:
    """The ratio of the times of `slower` and `faster`, with its goal."""
    ratio = median_ratio(timings, str(slower), str(faster))
    return at_least(name, ratio, goal, disturbed=all_disturbed(timings[str(slower)], timings[str(faster)]))
