"""The setups whose proposals are measured are those of eight ranks, and only faster steps count."""

from __future__ import annotations

import math
from typing import cast

import pytest

from fxpar.bench.explain.run import BATCH, CASES, GOAL_FASTER, Case, Outcome, bars
from fxpar.bench.planner.run import HOSTS, RANKS_PER_HOST
from fxpar.explainer.explain import Explanation
from fxpar.explainer.proposals import Proposal
from fxpar.explainer.setup import read_setup


def test_there_are_ten_cases_by_rate() -> None:
    rates = [case.rate_mbit for case in CASES]
    assert len(CASES) == 10 and rates == sorted(rates, reverse=True), "each rate is emulated once"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mesh}, {case.flaw}")
def test_every_case_is_a_setup_of_all_ranks(case: Case) -> None:
    given = {"schedule": "eager-1f1b", "stages": None, "layouts": None, "options": None, **case.others}
    setup = read_setup(case.mesh, case.microbatches, **given)
    assert math.prod(setup.mesh.values()) == HOSTS * RANKS_PER_HOST
    assert BATCH % (setup.mesh["data"] * setup.mesh["z"] * setup.microbatches) == 0
    assert case.sizes["layers"] >= setup.mesh["pipe"]


def test_a_proposal_counts_if_its_step_is_faster() -> None:
    def outcome(given_ms: float, proposed_ms: float) -> Outcome:
        return Outcome(CASES[0], cast(Explanation, None), cast(Proposal, None), given_ms, proposed_ms, 0.0)

    (bar,) = bars([outcome(2.0, 1.0), outcome(1.0, 1.0), outcome(1.0, 2.0)])
    assert (bar.value, bar.goal, bar.met) == (1, GOAL_FASTER, False)
    assert outcome(2.0, 1.5).gain == 0.25
