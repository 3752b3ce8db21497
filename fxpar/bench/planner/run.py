"""`fxpar bench planner`: whether the mesh with the best predicted time is the fastest of all measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import fxpar
from fxpar.bench.hosts.emulated_cluster import EmulatedCluster
from fxpar.bench.measure.interleaved import Step, time_interleaved, timings_of_ranks
from fxpar.bench.models import example
from fxpar.bench.report import Bar, Report, Row, Say, at_least, at_most
from fxpar.calibrate.calibrate import calibrate
from fxpar.errors import FxparError
from fxpar.hardware.cluster import Cluster
from fxpar.ir.layout import AXES
from fxpar.planner.configuration import Configuration, candidates
from fxpar.planner.imagined_mesh import imagined_mesh, imagined_world
from fxpar.planner.step_model import Estimate, StepModel

HOSTS, RANKS_PER_HOST = 4, 2
"""Eight ranks have 25 meshes, too many to be ranked well by chance. With two ranks per host, it matters which axes
cross hosts. More ranks would contend for two processors even while they sleep."""

RATE_MBIT = 200.0
"""The rate that the emulation holds within 5% for eight ranks; at 1 Gbit/s TCP itself would take the processors."""

WARM_UP, REPEATS = 1, 3
"""A sleeping step always takes equally long unless others disturb it: a median of three tolerates one such round."""

SCHEDULE = "eager-1f1b"
"""One schedule for all meshes, since meshes are compared: the one that hides most without splitting backwards."""

LAYERS, BATCH = 4, 32
CONFIG: Mapping[str, int] = {"layers": LAYERS, "hidden": 256, "heads": 8, "context": 64, "vocabulary": 256}
"""Layers for four stages, heads for eight shards, and a batch for any number of batch shards and their microbatches, so
that nearly every mesh is possible."""

FLOPS_PER_US, MEMORY_BYTES_PER_US = 8e3, 4e3
"""The assumed speed of ranks. Eight of them compute the model's 40 GFLOP in 0.6 s; summing its gradients, 13 MB,
between hosts takes as long, so that neither decides alone. At such a memory bandwidth, ops other than matmuls matter,
as they do in narrow models."""

TOP = 5
"""How many of 25 meshes a user would still try."""

GOAL_BEST_AMONG, GOAL_OF_TOP, GOAL_CORRELATION = 2, 4, 0.9


@dataclass(frozen=True, slots=True)
class Outcome:
    """A configuration, the step times that two models predict, and what was measured."""

    configuration: Configuration
    predicted_ms: float
    agnostic_ms: float
    measured_ms: float
    processors_of_others: float


def run(say: Say, mode: str = "emulate") -> Report:
    """All meshes of eight ranks on four emulated hosts, which sleep in place of computing; takes a quarter of an hour.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    assert mode == "emulate", f"there is no way to measure a plan {mode}"
    with EmulatedCluster(HOSTS, rate_mbit=RATE_MBIT) as hosts:
        say("calibrating")
        cluster = slowed(hosts.run(RANKS_PER_HOST, measure_links)[0])
        predictions = predict(cluster, say)
        outcomes = list(measure(hosts, cluster, predictions.estimates, say))
    dropped: list[Row] = [{"configuration": str(at), "not measured": why} for at, why in predictions.dropped.items()]
    rows = [_row(outcome) for outcome in outcomes] + dropped + [summary(outcomes, len(dropped))]
    return Report(rows, bars(outcomes))


def measure_links() -> Cluster:
    """Measure the network between the ranks. Every rank calls it."""
    return calibrate("emulated", torch.device("cpu"), _silent).cluster


def _silent(what: str) -> None:
    pass


def slowed(cluster: Cluster) -> Cluster:
    """The same links, with the computing speed that the sleeping ranks are assumed to have."""
    rates = {"float32": FLOPS_PER_US}
    return replace(cluster, matmul_flops_per_us=rates, memory_bytes_per_us=MEMORY_BYTES_PER_US)


def measure(
    hosts: EmulatedCluster, cluster: Cluster, estimates: Mapping[Configuration, tuple[Estimate, float]], say: Say
) -> Iterator[Outcome]:
    """Run every configuration that has an estimate, in the order of the predicted times."""
    by_time = sorted(estimates.items(), key=lambda item: item[1][0].step_us)
    for number, (configuration, (estimate, agnostic_us)) in enumerate(by_time, start=1):
        say(f"{number} of {len(by_time)}: {configuration}")
        timings = timings_of_ranks(hosts.run(RANKS_PER_HOST, run_configuration, estimate, cluster, timeout_s=600))[
            "step"
        ]
        seconds = statistics.median(timing.seconds for timing in timings)
        others = statistics.median(timing.others for timing in timings)
        yield Outcome(configuration, estimate.step_us / 1e3, agnostic_us / 1e3, 1e3 * seconds, others)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions by configuration.

    estimates: the estimate, and the step time in microseconds of a model that does not know hosts. dropped: the error
    of configurations that cannot be made.
    """

    estimates: dict[Configuration, tuple[Estimate, float]] = field(default_factory=dict)
    dropped: dict[Configuration, str] = field(default_factory=dict)


def predict(cluster: Cluster, say: Say) -> Predictions:
    """The predictions of all configurations. Meshes that do not fit the model are dropped."""
    found = Predictions()
    with imagined_world(HOSTS * RANKS_PER_HOST):
        for configuration in configurations():
            say(f"predicting {configuration}")
            try:
                known, agnostic = _estimates(configuration, cluster)
            except FxparError as error:
                found.dropped[configuration] = str(error)
                continue
            found.estimates[configuration] = known, agnostic.step_us
    return found


def configurations() -> list[Configuration]:
    """Meshes of all ranks, with as many microbatches as keep a pipeline busy. y without x is left out: it equals x."""

    def is_wanted(each: Configuration) -> bool:
        pipe, y, x = (each.mesh[axis] for axis in ("pipe", "y", "x"))
        return each.microbatches == (2 * pipe if pipe > 1 else 1) and (y == 1 or x > 1)

    return list(filter(is_wanted, candidates(HOSTS * RANKS_PER_HOST, BATCH)))


def _estimates(configuration: Configuration, cluster: Cluster) -> tuple[Estimate, Estimate]:
    """The estimates of a cost model that knows the hosts of ranks, and of one that does not."""
    torch.compiler.reset()  # or Dynamo would reach its recompile limit over so many meshes
    mesh = imagined_mesh(configuration.mesh, cluster)
    with torch.device("meta"):
        model = build()
    step = StepModel(model, batch(1), mesh, configuration.microbatches)
    divided = step.divide(SCHEDULE, step.memory_policies()[0])
    return step.estimate(divided), step.estimate(divided, knows_hosts=False)


def run_configuration(
    estimate: Estimate, cluster: Cluster, warm_up: int = WARM_UP, repeats: int = REPEATS
) -> Mapping[str, Sequence[Any]]:
    """Time the steps of a plan with sleeps in place of computation. Every rank calls it."""
    mesh = fxpar.init_mesh(*(estimate.plan.mesh[axis] for axis in AXES), cluster=cluster)
    own = batch(fxpar.num_batch_shards(mesh))
    model = build()
    fxpar.distribute(model, mesh, plan=estimate.plan)
    options: dict[str, Any] = {"lowering": "sleep", "schedule": SCHEDULE, **estimate.options}
    compiled = torch.compile(model, backend="fxpar", options=options)

    def step() -> None:
        compiled(**own).backward()
        model.zero_grad()

    steps: dict[str, Step] = {"step": step}
    return time_interleaved(steps, warm_up, repeats)


def build() -> nn.Module:
    """The example GPT."""
    gpt = example("gpt")
    model: nn.Module = gpt.GPT(gpt.Config(**CONFIG))
    return model


def batch(shards: int) -> dict[str, Tensor]:
    """One of that many equal parts of the batch; the values of its tokens do not matter."""
    tokens = torch.zeros(BATCH // shards, CONFIG["context"], dtype=torch.long)
    return {"tokens": tokens, "targets": tokens.clone()}


def _row(outcome: Outcome) -> Row:
    return {
        "configuration": str(outcome.configuration),
        "predicted_ms": outcome.predicted_ms,
        "agnostic_ms": outcome.agnostic_ms,
        "measured_ms": outcome.measured_ms,
        "measured_over_predicted": outcome.measured_ms / outcome.predicted_ms,
        "processors_of_others": outcome.processors_of_others,
    }


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well the order of predicted times agrees with that of measured times.

    rank_of_best: the place of the truly fastest in the predicted order, counted from 1.
    of_top: how many of the first `TOP` predicted are truly among the first `TOP`.
    correlation: Spearman's rank correlation of all.
    """

    rank_of_best: int
    of_top: int
    correlation: float

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> Agreement:
        """The agreement of two lists of times of the same configurations."""
        by_predicted, by_measured = (sorted(range(len(each)), key=each.__getitem__) for each in (predicted, measured))
        return cls(
            by_predicted.index(by_measured[0]) + 1,
            len({*by_predicted[:TOP]} & {*by_measured[:TOP]}),
            float(spearmanr(predicted, measured).statistic),
        )


def _agreements(outcomes: Sequence[Outcome]) -> tuple[Agreement, Agreement]:
    """The agreement of the cost model that knows hosts, and of the one that does not."""
    measured = [outcome.measured_ms for outcome in outcomes]
    known = Agreement.of([outcome.predicted_ms for outcome in outcomes], measured)
    return known, Agreement.of([outcome.agnostic_ms for outcome in outcomes], measured)


def summary(outcomes: Sequence[Outcome], num_dropped: int) -> Row:
    """The agreement of both cost models, and how many configurations were dropped."""
    known, agnostic = _agreements(outcomes)
    return {
        "configurations": len(outcomes),
        "dropped": num_dropped,
        "rank_of_best": known.rank_of_best,
        f"of_top_{TOP}": known.of_top,
        "correlation": known.correlation,
        "agnostic_rank_of_best": agnostic.rank_of_best,
        f"agnostic_of_top_{TOP}": agnostic.of_top,
        "agnostic_correlation": agnostic.correlation,
    }


def bars(outcomes: Sequence[Outcome]) -> list[Bar]:
    """The goals: the agreement that the paper reports of its model (Singh et al., section on the performance model)."""
    known, _ = _agreements(outcomes)
    return [
        at_most("rank of the fastest mesh in the predicted order", known.rank_of_best, GOAL_BEST_AMONG),
        at_least(f"of the {TOP} predicted best, truly among the best {TOP}", known.of_top, GOAL_OF_TOP),
        at_least("rank correlation of predicted and measured times", known.correlation, GOAL_CORRELATION),
    ]
