"""Timelines have the figures of their spans, and traces give them back."""

import json
from pathlib import Path

import pytest

from fxpar.errors import InvalidTimelineError
from fxpar.schedule import Action, Span, Timeline, Transfer, build_schedule, chain, lower, simulate, uniform_costs
from fxpar.schedule.timeline import COMPUTE, SENDS, save_trace

VALUE = Transfer("out0", 0, 0, (1,))
STEP = Timeline(
    (
        Span.of_action(0, Action(0, "F", 0), 100.0, 110.0),
        Span.of_transfer(0, SENDS, VALUE, 110.0, 115.5),
        Span.of_transfer(0, SENDS, Transfer("skip", 0, 0, (1,)), 111.0, 120.0),
        Span.of_action(1, Action(1, "F", 0), 120.0, 140.0),
    )
)


def _simulated() -> Timeline:
    schedule = build_schedule("zb-h1", 3, 4)
    costs = uniform_costs(range(3), chain(3), {"F": [1.1] * 3, "I": [0.7] * 3, "W": [0.3] * 3}, 0.1, 0.2)
    return simulate(lower(schedule, chain(3)), costs)


def test_figures_count_from_the_first_begin() -> None:
    assert STEP.makespan_us == 40.0
    assert STEP.busy_us == {0: 10.0, 1: 20.0}
    assert STEP.bubble_share == pytest.approx(1 - 30 / 80)
    assert STEP.from_start().begin_us == 0.0
    assert STEP.from_start().makespan_us == 40.0


def test_of_nothing_all_figures_are_0() -> None:
    assert (Timeline(()).makespan_us, Timeline(()).bubble_share, Timeline(()).ranks) == (0.0, 0.0, ())


def test_what_overlaps_in_a_lane_is_on_tracks_of_its_own() -> None:
    tracks = [(rank, lane, [span.name for span in spans]) for rank, lane, spans in STEP.tracks()]
    assert tracks == [
        (0, COMPUTE, ["0F0"]),
        (0, SENDS, ["out0[0] 0->1"]),
        (0, SENDS, ["skip[0] 0->1"]),
        (1, COMPUTE, ["1F0"]),
    ]


def test_a_trace_gives_back_its_timeline(tmp_path: Path) -> None:
    simulated = _simulated()
    simulated.save(tmp_path / "trace.json")
    assert set(Timeline.load(tmp_path / "trace.json").spans) == set(simulated.spans)


def test_traces_of_single_ranks_merge_to_that_of_the_step(tmp_path: Path) -> None:
    simulated = _simulated()
    for rank in simulated.ranks:
        own = Timeline(tuple(span for span in simulated.spans if span.rank == rank))
        own.save(tmp_path / f"timeline.rank{rank}.json")
    merged = Timeline.load(tmp_path)
    assert set(merged.spans) == set(simulated.spans)
    assert merged.makespan_us == simulated.makespan_us


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTimelineError, match=r"no file \*timeline\*\.json"):
        Timeline.load(tmp_path)


def test_a_trace_has_a_process_per_rank_and_a_thread_per_lane(tmp_path: Path) -> None:
    save_trace(tmp_path / "trace.json", {"simulated": STEP, "measured": STEP})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["rank 0 simulated", "rank 1 simulated", "rank 0 measured", "rank 1 measured"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == [COMPUTE, SENDS, SENDS, COMPUTE] * 2
    computed = next(event for event in events if event["name"] == "0F0")
    assert (computed["ph"], computed["ts"], computed["dur"], computed["cat"]) == ("X", 100.0, 10.0, COMPUTE)
    assert len({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}) == 8


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}'])
def test_a_file_that_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(InvalidTimelineError, match=r"trace\.json"):
        Timeline.load(tmp_path / "trace.json")
