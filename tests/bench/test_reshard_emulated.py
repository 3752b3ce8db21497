"""Cases run on emulated hosts, whose figures are put against bounds; how large they are is for `fxpar bench`."""

from __future__ import annotations

import pytest

from fxpar.bench.hosts.emulated_cluster import EmulatedCluster
from fxpar.bench.reshard.emulated import REPEATS, measure, rows
from fxpar.bench.reshard.problems import nine_cases, one_to_many
from fxpar.hardware.network import Network
from fxpar.resharding.strategies import STRATEGIES

FAST = Network(bytes_per_us=125.0, chunk_us=100.0)


@pytest.fixture(autouse=True)
def can_emulate() -> None:
    """Skips where hosts cannot be emulated."""
    if reason := EmulatedCluster.missing():
        pytest.skip(reason)


def test_all_strategies_of_a_case_run_in_turns_and_only_broadcast_has_a_goal() -> None:
    (case,) = (problem for problem in nine_cases(50_000) if problem.name == "7")
    found = list(rows(measure([case], FAST, tries=1)))
    assert [row["strategy"] for row, _ in found] == list(STRATEGIES)
    for row, bars in found:
        is_broadcast = row["strategy"] == "broadcast"
        assert len(bars) == is_broadcast
        assert row["repeats"] == REPEATS
        assert row["median_over_bound"] == pytest.approx(float(row["median_s"]) / float(row["bound_s"]))
        assert float(row["median_over_bound"]) > 1, "nothing is faster than the links"
        assert (row["median_over_broadcast"] == 1) == is_broadcast
        assert row["rounds"] == REPEATS
        assert 0 <= float(row["processors_of_others"]) < 1


def test_problems_with_the_same_hosts_share_a_run() -> None:
    problems = one_to_many(50_000)[4:6]
    found = measure(problems, FAST, tries=1)
    assert [each.transfer.name for each in found.transfers] == [p.name for p in problems for _ in STRATEGIES]
