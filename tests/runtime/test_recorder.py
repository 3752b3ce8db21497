"""What is recorded of a step: the actions of its schedule, and as much memory kept for the backward as was computed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from fxpar.cli import main
from fxpar.schedule import DELAYED, Compute, Costs, Program, Schedule, Timeline, Wait, lower, peak_memory
from fxpar.schedule.timeline import COMPUTE, SENDS, WAIT
from fxpar.world.launch import run_ranks
from tests.runtime.record_steps import record

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """A model in `num_stages` stages on a mesh, to be trained for a step under each schedule."""

    subject: str
    mesh: Mapping[str, int]
    num_stages: int
    schedules: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=lambda: {"lowering": "aten"})


CASES = {
    "one stage per rank": Case("gpt", {"pipe": 2}, 2, ("eager-1f1b", "zb-h1", "zb-h2", DELAYED)),
    "two stages per rank": Case("gpt", {"pipe": 2}, 4, ("interleaved",)),
    "shards": Case("gpt", {"pipe": 2, "x": 2}, 2, ("zb-h1",)),
    "skip connections": Case("unet", {"pipe": 2}, 2, ("eager-1f1b",)),
    "inductor": Case("gpt", {"pipe": 2}, 2, ("eager-1f1b",), {"lowering": "inductor"}),
    "weights gathered once": Case("gpt", {"z": 2}, 1, ("1f1b",)),
    "weights gathered for each": Case(
        "gpt", {"z": 2}, 1, ("gpipe",), {"lowering": "aten", "gather_weights": "microbatch"}
    ),
}


@dataclass(frozen=True, slots=True)
class Recording:
    """A step: its folder, what its ranks dumped, and the most that each pipe rank kept for its backward."""

    folder: Path
    schedule: Schedule
    costs: Costs
    saved_peak_bytes: list[int]

    @property
    def programs(self) -> tuple[Program, ...]:
        return lower(self.schedule, self.costs.edges)


@pytest.fixture(scope="module", params=CASES)
def recordings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    """The steps of a case, one for each of its schedules."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("recorded")
    num_ranks, pipe = math.prod(case.mesh.values()), case.mesh.get("pipe", 1)
    arguments = case.subject, case.mesh, case.num_stages, case.schedules, folder, case.options
    kept = run_ranks(num_ranks, record, *arguments)
    speakers = kept[:: num_ranks // pipe]  # of the ranks that share a place on the pipe axis, the first
    return [
        Recording(folder / name, _dumped(folder / name, name), Costs.load(folder / name), [p[turn] for p in speakers])
        for turn, name in enumerate(case.schedules)
    ]


def _dumped(folder: Path, name: str) -> Schedule:
    texts = {file.read_text(encoding="utf-8") for file in folder.glob("rank*/*_schedule.txt")}
    assert len(texts) == 1, "all ranks dump the same schedule"
    return Schedule.parse(texts.pop(), name)


def test_what_is_kept_takes_what_was_computed(recordings: list[Recording]) -> None:
    for recording in recordings:
        peaks = peak_memory(recording.programs, recording.schedule, recording.costs.edges, recording.costs.memory)
        computed = [rank.saved_peak_bytes for rank in peaks]
        assert all(computed), recording.schedule.name
        assert recording.saved_peak_bytes == pytest.approx(computed, rel=TOLERANCE), recording.schedule.name


def test_a_timeline_has_the_actions_and_waits_of_the_program_in_order(recordings: list[Recording]) -> None:
    for recording in recordings:
        files = list((recording.folder / "measured").glob("timeline.*"))
        assert len(files) == len(recording.schedule.ranks), "one of each place on the pipe axis"
        timeline = Timeline.load(recording.folder / "measured")
        assert timeline.ranks == tuple(range(len(files)))
        for rank, program in enumerate(recording.programs):
            spans = sorted((s for s in timeline.spans if s.rank == rank), key=lambda span: span.begin_us)
            ran = [span.name for span in spans if span.lane == COMPUTE]
            assert ran == [str(action) for action in recording.schedule.ranks[rank]]
            both = [span.name for span in spans if span.lane != SENDS]
            listed = [i for i in program.instructions if isinstance(i, Compute | Wait)]
            assert both == [str(i.action if isinstance(i, Compute) else i.transfer) for i in listed]
            assert {span.lane for span in spans} == ({COMPUTE, WAIT, SENDS} if len(files) > 1 else {COMPUTE})
            assert all(one.end_us <= next_.begin_us for one, next_ in pairwise(spans))


def test_what_a_compile_dumps_is_simulated_and_laid_beside_the_step(
    recordings: list[Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    for recording in recordings:
        folder, name = recording.folder, recording.schedule.name
        drawn = folder / "timelines.svg"
        flags = "--schedule", name, "--measured", str(folder / "measured"), "--svg", str(drawn)
        assert main(["simulate", str(folder), *flags]) == 0
        shown = capsys.readouterr().out
        assert name in shown and "simulated / measured" in shown and "peak MiB by rank" in shown
        assert "measured" in drawn.read_text(encoding="utf-8")


def test_the_report_of_the_dump_has_the_recorded_step(recordings: list[Recording]) -> None:
    for recording in recordings:
        page = (recording.folder / "report.html").read_text(encoding="utf-8")
        (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
        data = json.loads(text)
        measured = Timeline.load(recording.folder / "measured")
        assert data["measured_us"] == pytest.approx(measured.makespan_us)
        assert [line["label"] for line in data["timelines"]] == ["simulated", "measured"]
        ran = [track for track in data["timelines"][1]["tracks"] if track["lane"] == COMPUTE]
        names = [[span[2] for span in track["spans"]] for track in ran]
        assert names == [[str(action) for action in actions] for actions in recording.schedule.ranks]
        assert len(data["stages"]) == recording.costs.num_stages
        assert len(data["memory"]) == len(recording.schedule.ranks)
