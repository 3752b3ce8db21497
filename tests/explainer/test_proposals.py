"""What is proposed is the best change of each kind, by numbers alone."""

from __future__ import annotations

import pytest

from fxpar.costs.graph_time import GraphTime
from fxpar.explainer.neighbours import Change, Kind
from fxpar.explainer.proposals import LEAST_GAIN, Proposal, most_helpful, proposal
from fxpar.explainer.setup import read_setup
from fxpar.ir.plan import Plan
from fxpar.planner.step_model import Estimate
from fxpar.planner.step_parts import optimizer_us, step_parts
from fxpar.report.step_parts import StepParts

SETUP = read_setup("x=2", 1, "1f1b", None, None, None)


def estimate(compute_us: float, x_us: float, bubble_us: float, own_optimizer_us: float = 0.0) -> Estimate:
    parts = StepParts(compute_us, {"x": x_us}, bubble_us)
    plan = Plan((), SETUP.mesh, 1, "1f1b", {}, (0,))
    return Estimate(plan, {}, parts.total_us, compute_us, 0, {}, parts, own_optimizer_us)


def change(kind: Kind, text: str = "") -> Change:
    return Change(kind, text, SETUP)


def test_a_gain_is_a_share_of_the_step_with_its_optimizer() -> None:
    given, changed = estimate(50.0, 40.0, 0.0, 10.0), estimate(55.0, 10.0, 0.0, 10.0)
    found = proposal(change("mesh"), changed, given)
    assert found.gain == pytest.approx(0.25)
    assert found.step_us == pytest.approx(75.0)
    assert found.reason == "exposed communication over x: -0.03 ms"
    assert proposal(change("mesh"), given, changed).gain == pytest.approx(1 - 100 / 75)


def test_the_best_of_each_kind_is_proposed_if_it_helps_noticeably() -> None:
    def tried(kind: Kind, gain: float) -> Proposal:
        return Proposal(change(kind, f"{kind} {gain}"), estimate(1.0, 0.0, 0.0), gain, "")

    everything = [tried("mesh", 0.1), tried("mesh", 0.3), tried("schedule", 0.2), tried("memory", LEAST_GAIN / 2)]
    assert [each.change.text for each in most_helpful(everything, fits=True)] == ["mesh 0.3", "schedule 0.2"]
    worse = [tried("memory", -0.1), tried("mesh", -0.2)]
    assert not most_helpful(worse, fits=True)
    assert [each.change.text for each in most_helpful(worse, fits=False)] == ["memory -0.1", "mesh -0.2"]
    kinds: list[Kind] = ["mesh", "schedule", "memory", "layouts"]
    assert len(most_helpful([tried(kind, 0.5) for kind in kinds], fits=True)) == 3


def test_parts_of_a_step_add_up_to_it() -> None:
    actions = GraphTime(100.0, 80.0, exposed_by_axis_us={"x": 20.0, "y": 0.0})
    once = GraphTime(10.0, 1.0, exposed_by_axis_us={"data": 9.0})
    parts = step_parts(actions, once, 150.0, 130.0)
    assert parts == StepParts(81.0, {"pipe": 20.0, "x": 20.0, "data": 9.0}, 30.0)
    assert parts.total_us == 160.0
    hidden = step_parts(actions, once, 150.0, 155.0)
    assert hidden == StepParts(81.0, {"x": 20.0, "data": 9.0}, 50.0), "no negative part, though the order is worse"


def test_adam_reads_and_writes_seven_weights_for_each_weight() -> None:
    assert optimizer_us(state_bytes=2 * 4, memory_bytes_per_us=1.0) == 7 * 4
