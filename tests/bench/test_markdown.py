"""Reports become one Markdown table with every goal, missed ones included."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpar.bench.markdown import markdown_of, read_report
from fxpar.bench.report import Report, at_least, at_most, to_json
from fxpar.cli import main
from fxpar.errors import UnreadableReportError

FAST, SLOW = "a machine", "another machine"


def test_every_goal_is_a_row_under_the_machine_that_it_was_measured_on(tmp_path: Path) -> None:
    bars = [at_most("GPT, 4 stages: time", 1.25, 1.5), at_least("speed-up", 0.98765, 1, disturbed=True)]
    reports = {"fxpar bench overlap --emulate": Report([], bars, SLOW), "fxpar bench step": Report([], bars[:1], FAST)}
    files = []
    for command, report in reports.items():
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(to_json(report, command))
    assert markdown_of([read_report(path) for path in files]).splitlines() == [
        "Measured on a machine:",
        "",
        "| command | measured | goal | value | reached |",
        "|---|---|--:|--:|---|",
        "| `fxpar bench step` | GPT, 4 stages: time | at most 1.5 | 1.25 | yes |",
        "",
        "Measured on another machine:",
        "",
        "| command | measured | goal | value | reached |",
        "|---|---|--:|--:|---|",
        "| `fxpar bench overlap --emulate` | GPT, 4 stages: time | at most 1.5 | 1.25 | yes |",
        "| `fxpar bench overlap --emulate` | speed-up | at least 1 | 0.9877 | **no**, disturbed |",
    ]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"command": "", "machine": "", "bars": [{"goal": 1}]}'])
def test_a_file_that_is_no_report_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnreadableReportError, match=r"report.json: expected what `fxpar bench NAME --json` prints"):
        read_report(path)


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    path.write_text(to_json(Report([], [at_most("time", 2, 1)], FAST), "fxpar bench step"))
    assert main(["bench", "report", str(path)]) == 0
    assert "| `fxpar bench step` | time | at most 1 | 2 | **no** |" in capsys.readouterr().out
    assert main(["bench", "report", str(tmp_path / "none.json")]) == 2
