"""A step is read from the files of its ranks, and what is wrong with them is an error that says what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fxpar.analysis.dumped_step import DumpedStep, read_dump
from fxpar.analysis.write_report import write_report_if_possible
from fxpar.cli import main
from fxpar.hardware.cluster import cluster_named
from fxpar.report.facts import RankFacts, StepFacts, from_json, to_json
from fxpar.schedule import peak_memory
from tests.support.imagined_dump import Imagined, dump_imagined


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)), nn.Linear(64, 1))
        rows = torch.zeros(32, 64)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).mean()

    cluster = replace(cluster_named("laptop"), ranks_per_host=2)
    dump_imagined(Loss(), (rows,), Imagined({"pipe": 2, "data": 2}, cluster, 4, "zb-h1"), folder)
    return folder


@pytest.fixture(scope="module")
def step(folder: Path) -> DumpedStep:
    return read_dump(folder)


def test_facts_are_what_was_written(folder: Path, step: DumpedStep) -> None:
    assert from_json(StepFacts, to_json(step.facts)) == step.facts
    (file,) = folder.glob("rank3/*_rank_facts.json")
    facts = from_json(RankFacts, file.read_text(encoding="utf-8"))
    assert [stage.stage for stage in facts.stages] == [1]
    assert from_json(RankFacts, to_json(facts)) == facts


def test_facts_are_of_the_mesh_and_the_stages(step: DumpedStep) -> None:
    facts = step.facts
    assert facts.sizes == {"pipe": 2, "data": 2, "z": 1, "y": 1, "x": 1}
    assert facts.hosts == (0, 0, 1, 1)
    crossing = {axis.axis: (axis.num_hosts, axis.crosses_hosts) for axis in facts.axes}
    assert crossing["pipe"] == (2, True) and crossing["data"] == (1, False)
    weights = {each.name: each.num_bytes for each in facts.layouts if each.kind == "parameter"}
    assert weights["layers.0.0.weight"] == 64 * 64 * 4 and len(weights) == 10
    results = {each.name: each.shape for each in facts.layouts if each.kind == "result"}
    assert results["layers.0.0"] == (8, 64), "of one microbatch"
    sums = [each for each in step.stages[0].collectives if each.axis == "data"]
    assert [(each.graph, each.kind) for each in sums] == [("once", "all_reduce")]
    assert step.once_us(0) == sums[0].exposed_us > 0


def test_a_stage_is_that_of_the_rank_that_takes_longest_for_it(folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*.json"):
        copied = tmp_path / path.relative_to(folder)
        copied.parent.mkdir(exist_ok=True)
        copied.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    (file,) = tmp_path.glob("rank3/*_rank_facts.json")
    changed = json.loads(file.read_text(encoding="utf-8"))
    before = changed["stages"][0]["actions"]["F"]["total_us"]
    changed["stages"][0]["actions"]["F"]["total_us"] = 2 * before
    file.write_text(json.dumps(changed), encoding="utf-8")
    assert read_dump(tmp_path).costs.action_us(1, "F") == 2 * before


def test_memory_at_actions_has_the_peaks_of_programs(step: DumpedStep) -> None:
    peaks = peak_memory(step.programs, step.schedule, step.costs.edges, step.costs.memory)
    for peak, actions in zip(peaks, step.memory, strict=True):
        assert [each.action for each in actions] == list(step.schedule.ranks[peak.rank])
        assert max(sum(each.running.values()) for each in actions) == peak.peak_bytes
        assert actions[0].after["gradients"] == 0 < actions[-1].after["gradients"]
        assert actions[-1].after["saved"] == 0


def test_a_folder_without_a_dump_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert str(tmp_path) in shown and "found no rank0/*_step_facts.json" in shown
    assert 'options={"dump": FOLDER}' in shown


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"version": 99}', "facts of version 99, expected 1"),
        ('{"version": 1}', "incomplete facts"),
        ("{", "no facts of a step"),
        ("[]", "no facts of a step"),
    ],
)
def test_facts_of_another_release_are_refused(
    text: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "01_step_facts.json").write_text(text, encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    assert found in capsys.readouterr().err


def test_what_keeps_a_report_from_being_made_does_not_keep_a_step_from_running(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no report.html in .*: expected the dump of a training step"):
        write_report_if_possible(tmp_path, measured=())
