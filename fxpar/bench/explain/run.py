"""`fxpar bench explain`: whether the first change that is proposed for a setup makes its step faster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar.bench.hosts.emulated_cluster import EmulatedCluster
from fxpar.bench.measure.interleaved import Step, median_ms, time_interleaved, timings_of_ranks
from fxpar.bench.models import example
from fxpar.bench.planner.run import HOSTS, RANKS_PER_HOST, measure_links, slowed
from fxpar.bench.report import Bar, Report, Row, Say, at_least
from fxpar.explainer.explain import Explanation, explain
from fxpar.explainer.proposals import Proposal
from fxpar.explainer.setup import Setup
from fxpar.hardware.cluster import Cluster
from fxpar.ir.layout import AXES

WARM_UP, REPEATS = 1, 3
"""Sleeping steps always take equally long unless others disturb them."""

BATCH, CONTEXT = 32, 64

WIDE: Mapping[str, int] = {"layers": 4, "hidden": 256, "heads": 8, "context": CONTEXT, "vocabulary": 256}
NARROW: Mapping[str, int] = {"layers": 8, "hidden": 128, "heads": 8, "context": CONTEXT, "vocabulary": 256}
"""As in `fxpar bench planner`, and deeper but narrower: a quarter of its arithmetic and gradients in twice as many
layers, so that latencies and small ops count for more."""

FAST_MBIT, SLOW_MBIT = 200.0, 100.0
"""Rates that the emulation holds, see `fxpar bench planner`."""

GOAL_FASTER = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A setup of eight ranks, two on each host: what is bad about it, and what `explain` is given."""

    flaw: str
    sizes: Mapping[str, int]
    rate_mbit: float
    mesh: str
    microbatches: int = 1
    others: Mapping[str, Any] = field(default_factory=dict)


_PER_MICROBATCH = {"gather_weights": "microbatch", "reduce_gradients": "microbatch"}

CASES = (
    Case("tensor parallelism between hosts", WIDE, FAST_MBIT, "x=8"),
    Case("too few microbatches", WIDE, FAST_MBIT, "pipe=4 x=2"),
    Case("every rank has all gradients", WIDE, FAST_MBIT, "data=8"),
    Case(
        "matrices are kept whole",
        WIDE,
        FAST_MBIT,
        "data=4 x=2",
        others={"layouts": {"blocks.*.mlp.*.weight": (None, None), "blocks.*.attention.*.weight": (None, None)}},
    ),
    Case("none: middling", WIDE, FAST_MBIT, "pipe=2 data=2 x=2", 4, {"schedule": "1f1b"}),
    Case("a stage for each layer", NARROW, FAST_MBIT, "pipe=8", 8, {"schedule": "1f1b"}),
    Case("two axes of tensor parallelism, one between hosts", NARROW, FAST_MBIT, "data=2 y=2 x=2"),
    Case("weights are gathered for every microbatch", WIDE, SLOW_MBIT, "z=8", 4, {"options": _PER_MICROBATCH}),
    Case("none: middling", WIDE, SLOW_MBIT, "pipe=4 data=2", 4, {"schedule": "gpipe"}),
    Case("recomputes what would fit", NARROW, SLOW_MBIT, "pipe=4 data=2", 8, {"options": {"remat": "full"}}),
)
"""Bad and middling setups, chosen before any of them was measured; by rate, since each has its own emulation."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case, what was proposed first, and both steps as measured."""

    case: Case
    explanation: Explanation
    proposal: Proposal
    given_ms: float
    proposed_ms: float
    processors_of_others: float

    @property
    def gain(self) -> float:
        """The share of the step that the change saved."""
        return 1 - self.proposed_ms / self.given_ms


def run(say: Say, mode: str = "emulate") -> Report:
    """All cases on four emulated hosts, whose ranks sleep in place of computing.

    Raises:
        ClusterUnavailableError: this machine or user cannot emulate hosts.
    """
    assert mode == "emulate", f"there is no way to measure proposals {mode}"
    outcomes = [
        each for rate, cases in groupby(CASES, key=lambda case: case.rate_mbit) for each in _at(rate, cases, say)
    ]
    return Report([_row(outcome) for outcome in outcomes], bars(outcomes))


def _at(rate_mbit: float, cases: Iterator[Case], say: Say) -> Iterator[Outcome]:
    """The outcomes of cases on links of one rate; a case for which nothing is proposed has none."""
    with EmulatedCluster(HOSTS, rate_mbit=rate_mbit) as hosts:
        say("calibrating")
        cluster = slowed(hosts.run(RANKS_PER_HOST, measure_links)[0])
        for case in cases:
            say(f"explaining {case.mesh}: {case.flaw}")
            found = explain_case(case, cluster)
            if found.proposals:
                say(f"measuring {case.mesh}: {case.flaw}")
                outcome = measure(hosts, cluster, case, found)
                say(f"{outcome.proposal.change.text}: {outcome.given_ms:.0f} -> {outcome.proposed_ms:.0f} ms")
                yield outcome


def explain_case(case: Case, cluster: Cluster) -> Explanation:
    """What is proposed for a case, whose changes are all estimated."""
    with torch.device("meta"):
        model = build(case.sizes)
    return explain(
        model,
        batch(1),
        cluster,
        case.mesh,
        microbatches=case.microbatches,
        seconds=math.inf,
        **case.others,
    )


def measure(hosts: EmulatedCluster, cluster: Cluster, case: Case, found: Explanation) -> Outcome:
    """Time the setup of a case and the first proposal, in turns."""
    first = found.proposals[0]
    setups = {"given": found.setup, "proposed": first.change.setup}
    timings = timings_of_ranks(hosts.run(RANKS_PER_HOST, time_setups, setups, case.sizes, cluster, timeout_s=600))
    others = statistics.median(timing.others for each in timings.values() for timing in each)
    return Outcome(case, found, first, median_ms(timings["given"]), median_ms(timings["proposed"]), others)


def time_setups(setups: Mapping[str, Setup], sizes: Mapping[str, int], cluster: Cluster) -> Mapping[str, Sequence[Any]]:
    """Time the steps of several setups with sleeps in place of computation. Every rank calls it."""
    return time_interleaved({name: _step(setup, sizes, cluster) for name, setup in setups.items()}, WARM_UP, REPEATS)


def _step(setup: Setup, sizes: Mapping[str, int], cluster: Cluster) -> Step:
    """The step as a user would set it up."""
    torch.compiler.reset()  # each setup's model is traced anew
    mesh = fxpar.init_mesh(*(setup.mesh[axis] for axis in AXES), cluster=cluster)
    own = batch(fxpar.num_batch_shards(mesh))
    model = build(sizes)
    fxpar.distribute(model, mesh, example_inputs=own, **setup.distribute_arguments)
    compiled = torch.compile(model, backend="fxpar", options={"lowering": "sleep", **setup.given_options})

    def step() -> None:
        compiled(**own).backward()
        model.zero_grad()

    return step


def build(sizes: Mapping[str, int]) -> nn.Module:
    """The example GPT."""
    gpt = example("gpt")
    model: nn.Module = gpt.GPT(gpt.Config(**sizes))
    return model


def batch(shards: int) -> dict[str, Tensor]:
    """One of that many equal parts of the batch; the values of its tokens do not matter."""
    tokens = torch.zeros(BATCH // shards, CONTEXT, dtype=torch.long)
    return {"tokens": tokens, "targets": tokens.clone()}


def _row(outcome: Outcome) -> Row:
    case, proposal = outcome.case, outcome.proposal
    return {
        "flaw": case.flaw,
        "model": f"{case.sizes['layers']} x {case.sizes['hidden']}",
        "rate_mbit": case.rate_mbit,
        "given": f"{outcome.explanation.setup.configuration}",
        "proposed": proposal.change.text,
        "predicted_given_ms": outcome.explanation.estimate.step_us / 1e3,
        "predicted_proposed_ms": proposal.estimate.step_us / 1e3,
        "measured_given_ms": outcome.given_ms,
        "measured_proposed_ms": outcome.proposed_ms,
        "predicted_gain": 1 - proposal.estimate.step_us / outcome.explanation.estimate.step_us,
        "measured_gain": outcome.gain,
        "faster": outcome.gain > 0,
        "processors_of_others": outcome.processors_of_others,
    }


def bars(outcomes: Sequence[Outcome]) -> list[Bar]:
    """The goal: that a user who follows the first proposal seldom loses by it."""
    faster = sum(outcome.gain > 0 for outcome in outcomes)
    return [at_least(f"first proposals that are faster, of {len(CASES)}", faster, GOAL_FASTER)]
