"""Predicted makespans of all strategies and algorithms in the cases of the paper (Zhuang et al.)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxpar.bench.report import Bar, Row, Say, exactly
from fxpar.resharding.cases import ITEMSIZE, NINE_CASES, ONE_TO_MANY, Case
from fxpar.resharding.plan import ReshardPlan, make_plan
from fxpar.resharding.search import ALGORITHMS
from fxpar.resharding.strategies import STRATEGIES


def simulate(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """A row per case and strategy; times are in units of D, the time of the whole tensor over one interface.

    The bars are, for broadcast, the makespans by the paper's model: the default algorithm reaches the bound, and the
    two simple ones have the known makespans.
    """
    for case in (*NINE_CASES, *ONE_TO_MANY):
        say(f"planning case {case.name}")
        for strategy in STRATEGIES:
            plans = plan_case(case, strategy)
            yield _row(case, strategy, plans), _bars(case, plans) if strategy == "broadcast" else []


def plan_case(case: Case, strategy: str) -> Mapping[str, ReshardPlan]:
    """The plan of a case in full size by every algorithm."""
    tiles = case.tiles()
    return {name: make_plan(*tiles, ITEMSIZE, case.hosts, strategy, name) for name in ALGORITHMS}


def _row(case: Case, strategy: str, plans: Mapping[str, ReshardPlan]) -> Row:
    default = plans["best"]
    return {
        "case": case.name,
        "strategy": strategy,
        "unit_tasks": len(default.tasks),
        "bound_over_D": float(default.bound_bytes / case.num_bytes),
        **{f"{name}_over_D": plan.makespan_bytes / case.num_bytes for name, plan in plans.items()},
    }


def _bars(case: Case, plans: Mapping[str, ReshardPlan]) -> list[Bar]:
    goals = {"naive": case.naive, "balance": case.balance, "best": case.bound}
    return [
        exactly(f"case {case.name}: makespan by {name}", plans[name].makespan_bytes / case.num_bytes, float(goal))
        for name, goal in goals.items()
    ]
