"""The critical path of a timeline, and what communication exposes, on steps that can be worked out by hand."""

from __future__ import annotations

import pytest

from fxpar.analysis.critical_path import Dependencies
from fxpar.analysis.predicted_parts import bubble_share
from fxpar.schedule import Timeline, build_schedule, chain, lower, simulate, uniform_costs


def _timeline(num_stages: int, microbatches: int, transfer_us: float) -> Timeline:
    edges = chain(num_stages)
    times = {"F": [100.0] * num_stages, "B": [200.0] * num_stages}
    schedule = build_schedule("1f1b", num_stages, microbatches)
    return simulate(lower(schedule, edges), uniform_costs(range(num_stages), edges, times, transfer_us, transfer_us))


def test_one_microbatch_goes_through_all_stages_and_back() -> None:
    path = Dependencies(_timeline(2, 1, 50.0)).critical_path()
    assert [span.name for span in path] == ["0F0", "out0[0] 0->1", "1F0", "1B0", "gradient of out0[0] 1->0", "0B0"]


def test_without_communication_the_path_is_as_long_as_the_step() -> None:
    timeline = _timeline(4, 8, 0.0)
    computed = [span for span in Dependencies(timeline).critical_path() if span.lane == "compute"]
    assert sum(span.end_us - span.begin_us for span in computed) == timeline.makespan_us == 300 * (8 + 3)
    assert not list(Dependencies(timeline).exposed())
    assert bubble_share(timeline) == pytest.approx(3 / 11)


def test_exposed_is_what_a_wait_lasts_beyond_the_making_of_its_message() -> None:
    timeline = _timeline(2, 1, 50.0)
    exposed = list(Dependencies(timeline).exposed())
    assert sorted((each.wait.rank, each.begin_us, each.time_us) for each in exposed) == [(0, 450, 50), (1, 100, 50)]
    # Of 700 us, rank 0 idles while rank 1 computes, and rank 1 at both ends.
    assert bubble_share(timeline) == pytest.approx(1 - (2 * 300 + 2 * 50) / (2 * 700))
