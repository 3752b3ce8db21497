"""The simulated figures are those of the paper's model, which were worked out apart from this code."""

from __future__ import annotations

from fractions import Fraction
from typing import TypeAlias

import pytest

from fxpar.bench.report import Row
from fxpar.bench.reshard.planning_time import CROSSINGS, GOALS_S, time_plan
from fxpar.bench.reshard.simulated import simulate
from fxpar.resharding.cases import NINE_CASES, CaseTransfer
from fxpar.resharding.units import unit_tasks

Rows: TypeAlias = dict[tuple[str, str], Row]
"""By case and strategy."""

COLUMNS = {
    "bound_over_D": ("1/2", "1/2", "1/2", "1/2", "1/2", "1/2", "1", "1", "1/2"),
    "naive_over_D": ("1/2", "1", "3/4", "15/16", "1", "1", "1", "1", "3/4"),
    "balance_over_D": ("1/2", "1/2", "3/4", "15/16", "3/4", "2/3", "1", "1", "3/4"),
    "best_over_D": ("1/2", "1/2", "1/2", "1/2", "1/2", "1/2", "1", "1", "1/2"),
}
"""Host-level simulation of broadcast in cases 1 to 9."""

VOLUMES = {
    "send_recv": (2, 2, 2, 0.5, 2, 2, 8, 3, 2),
    "local_allgather": (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2, 2, 0.5),
}
"""Of other strategies, what the busiest interface must carry in cases 1 to 9."""


@pytest.fixture(scope="module")
def rows() -> Rows:
    """What the benchmark finds."""
    return {(str(row["case"]), str(row["strategy"])): row for row, _ in simulate(lambda text: None)}


@pytest.mark.parametrize("column", COLUMNS)
def test_broadcast_takes_in_each_case_what_the_model_of_the_paper_says(rows: Rows, column: str) -> None:
    found = [rows[case.name, "broadcast"][column] for case in NINE_CASES]
    assert found == [float(Fraction(time)) for time in COLUMNS[column]]


@pytest.mark.parametrize("strategy", VOLUMES)
def test_other_strategies_are_as_slow_as_their_volume(rows: Rows, strategy: str) -> None:
    assert tuple(rows[case.name, strategy]["best_over_D"] for case in NINE_CASES) == VOLUMES[strategy]


def test_from_one_device_to_four_hosts_of_two_only_broadcast_sends_once(rows: Rows) -> None:
    times = {strategy: row["best_over_D"] for (case, strategy), row in rows.items() if case == "to 4x2"}
    assert times == {"broadcast": 1, "send_recv": 8, "local_allgather": 4, "global_allgather": 1.75}


def test_every_bar_of_the_cases_is_met() -> None:
    bars = [bar for _, found in simulate(lambda text: None) for bar in found]
    assert len(bars) == 3 * (9 + 7)
    assert all(bar.met for bar in bars), [bar for bar in bars if not bar.met]


def test_a_plan_is_timed_with_and_without_what_is_around_the_search() -> None:
    row = time_plan(CROSSINGS[0])
    assert row["unit_tasks"] == 64
    assert 0 < float(row["search_s"]) < float(row["plan_s"])


@pytest.mark.parametrize("crossing", CROSSINGS[:6], ids=lambda case: f"{case.source.mesh} {case.destination.mesh}")
def test_timed_plans_have_uneven_parts_and_as_many_tasks_as_there_is_a_goal_for(crossing: CaseTransfer) -> None:
    source, destination = crossing.tiles()
    tasks = unit_tasks(source, destination)
    assert len(tasks) in GOALS_S
    assert len({task.num_elements for task in tasks}) > 1
    assert all(tile.num_elements for tile in (*source.values(), *destination.values()))
