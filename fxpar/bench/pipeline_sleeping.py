"""Schedules of sleeping stages on emulated hosts: how much communication each hides, and how well that is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxpar.bench.cluster import EmulatedCluster
from fxpar.bench.report import Bar, Row, Say, at_least, at_most
from fxpar.bench.sleeping import Sleeping
from fxpar.bench.turns import Sample, Step, Turn, median_ms, median_ratio, take_turns, turns_of
from fxpar.resharding.network import Network
from fxpar.resharding.strategies import SIGNAL
from fxpar.schedule import DELAYED, Schedule, build_schedule, chain, lower, simulate

RATE_MBIT = 200.0
NETWORK = Network(bytes_per_us=RATE_MBIT / 8 * 0.956, chunk_us=150.0)
"""What TCP leaves of that rate, and what a message of gloo costs besides on two busy cores."""

MICROBATCHES = 32
WARM_UP, REPEATS = 1, 4

EXPOSED = 0.3
"""The share of a 1F1B step that is communication which nothing hides."""

MOST_OTHERS = 0.12
"""Rounds in which others took more of the processors are not counted."""

SCHEDULES = ("1f1b", "eager-1f1b", DELAYED, "zb-h1", "zb-h2")
SIGNALLED = ("eager-1f1b", DELAYED)

GOAL_SPEED_UP, GOAL_OF_SIGNAL, GOAL_PREDICTION = 1.3, 0.97, 0.05


@dataclass(frozen=True, slots=True)
class Variant:
    """A schedule, and how values move."""

    schedule: str
    strategy: str = "broadcast"

    def __str__(self) -> str:
        return self.schedule if self.strategy == "broadcast" else f"{self.schedule}, {self.strategy}"

    def built(self, model: Sleeping) -> Schedule:
        """Its schedule for `model`."""
        delays = model.costs(NETWORK).weight_delays(MICROBATCHES) if self.schedule == DELAYED else None
        return build_schedule(self.schedule, model.num_stages, MICROBATCHES, delays=delays)

    def predicted_ms(self, model: Sleeping) -> float:
        """What the simulator says."""
        programs = lower(self.built(model), chain(model.num_stages))
        return simulate(programs, model.costs(NETWORK, self.strategy)).makespan_us / 1e3


VARIANTS = (*(Variant(name) for name in SCHEDULES), *(Variant(name, SIGNAL) for name in SIGNALLED))


def sleeping(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """Two and four stages, with as much communication as eager-1F1B can hide, then with more."""
    for num_stages in (2, 4):
        model = exposing(EXPOSED, num_stages)
        say(f"{num_stages} sleeping stages on emulated hosts")
        yield from sleeping_rows("hidden", model, measure(model))
    for num_stages in (2, 4):
        model = exposing(0.5, num_stages)
        say(f"{num_stages} sleeping stages that communicate more than eager-1F1B can hide")
        yield from sleeping_rows("more", model, measure(model))


def exposing(share: float, num_stages: int) -> Sleeping:
    """Stages whose 1F1B step is for that `share` communication.

    A microbatch takes P + C (S - 1) / S, with P of computation and C of communication there and back.
    """
    compute_us = sum(Sleeping(num_stages, 0).compute_us[kind] for kind in ("F", "B"))
    both_ways_us = compute_us * share / (1 - share) * num_stages / (num_stages - 1)
    one_way_us = both_ways_us / 2 - NETWORK.chunk_us
    return Sleeping(num_stages, int(one_way_us * NETWORK.bytes_per_us) // 4 * 4)


def measure(model: Sleeping) -> dict[str, list[Turn]]:
    """All variants, each stage on a host of its own.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    with EmulatedCluster(model.num_stages, rate_mbit=RATE_MBIT) as cluster:
        return turns_of(cluster.run(1, run_variants, model))


def run_variants(model: Sleeping) -> Mapping[str, Sequence[Sample]]:
    """What each rank does."""
    steps: dict[str, Step] = {str(v): model.executor(v.built(model), NETWORK, v.strategy) for v in VARIANTS}
    return take_turns(steps, WARM_UP, REPEATS)


def sleeping_rows(case: str, model: Sleeping, turns: Mapping[str, Sequence[Turn]]) -> Iterator[tuple[Row, list[Bar]]]:
    """Every variant's figures, then what they must show: of communication that can be "hidden", or of "more"."""
    for variant in VARIANTS:
        measured, predicted = median_ms(turns[str(variant)]), variant.predicted_ms(model)
        row: Row = {
            "sleeping stages": model.num_stages,
            "communication": case,
            "variant": str(variant),
            "step_ms": measured,
            "predicted_ms": predicted,
            "measured_over_predicted": measured / predicted,
            "speed_up_over_1f1b": median_ratio(turns, "1f1b", str(variant)),
            "processors_of_others": max(turn.others for turn in turns[str(variant)]),
        }
        name = f"{model.num_stages} sleeping stages, {case}, {variant}: measured against predicted time"
        bar = at_most(name, abs(measured / predicted - 1), GOAL_PREDICTION)
        yield row, [bar] if variant.strategy != SIGNAL else []
    yield _row_of_bars(model, turns) if case == "hidden" else _row_of_further_gains(model, turns)


def _row_of_bars(model: Sleeping, turns: Mapping[str, Sequence[Turn]]) -> tuple[Row, list[Bar]]:
    """What the schedules hide of the communication, against each other and against none."""
    num_stages = model.num_stages
    upper_bound = str(Variant("eager-1f1b", SIGNAL))  # as Zhuang et al. have it
    hiding = "eager-1f1b" if num_stages == 2 else DELAYED
    speed_up = median_ratio(turns, "1f1b", "eager-1f1b")
    of_signal = median_ratio(turns, upper_bound, hiding)
    row: Row = {
        "sleeping stages": num_stages,
        "eager_over_1f1b": speed_up,
        "eager_of_signal": median_ratio(turns, upper_bound, "eager-1f1b"),
        "delayed_of_signal": median_ratio(turns, upper_bound, DELAYED),
        "delayed_of_its_own_signal": median_ratio(turns, str(Variant(DELAYED, SIGNAL)), DELAYED),
    }
    where = f"{num_stages} sleeping stages"
    return row, [
        at_least(f"{where}: eager-1f1b over 1f1b", speed_up, GOAL_SPEED_UP),
        at_least(f"{where}: {hiding}, throughput of signals", of_signal, GOAL_OF_SIGNAL),
    ]


def _row_of_further_gains(model: Sleeping, turns: Mapping[str, Sequence[Turn]]) -> tuple[Row, list[Bar]]:
    """What split backwards gain over eager-1F1B, which the simulator must have predicted."""
    row: dict[str, str | int | float | bool] = {"sleeping stages": model.num_stages}
    bars = []
    eager_ms = Variant("eager-1f1b").predicted_ms(model)
    for name in (DELAYED, "zb-h2"):
        gain, predicted = (
            median_ratio(turns, "eager-1f1b", name),
            eager_ms / Variant(name).predicted_ms(model),
        )
        row[f"{name}_over_eager"], row[f"{name}_predicted"] = gain, predicted
        where = f"{model.num_stages} sleeping stages that communicate more: {name} over eager-1f1b"
        bars.append(at_least(f"{where}, of what is predicted", gain / predicted, 1 - GOAL_PREDICTION))
        bars.append(at_least(where, gain, 1.0))
    return row, bars
