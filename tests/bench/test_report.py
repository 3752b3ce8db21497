"""Reports print as one JSON object or as tables, and know whether their goals are met."""

import io
import json
import math

from rich.console import Console

from fxpar.bench.report import Report, at_most, print_report, to_json

ROWS = [
    {"model": "gpt", "seconds": 1.25, "cold": True},
    {"model": "llama", "seconds": 0.5, "cold": False},
    {"instructions": 12, "us_per_instruction": 40.0},
]


def test_json_has_rows_bars_and_machine() -> None:
    report = Report(ROWS, [at_most("seconds", 1.25, 5)])
    found = json.loads(to_json(report, "fxpar bench step"))
    assert found["rows"] == ROWS
    assert found["bars"] == [{"name": "seconds, at most", "value": 1.25, "goal": 5, "met": True, "disturbed": False}]
    assert found["command"] == "fxpar bench step"
    assert "torch" in found["machine"]


def test_a_bar_is_met_up_to_its_goal_and_never_by_nan() -> None:
    assert at_most("ratio", 1.5, 1.5).met
    assert not at_most("ratio", 1.5001, 1.5).met
    assert not at_most("ratio", math.nan, 1.5).met


def test_a_report_is_met_when_all_its_bars_are() -> None:
    met, missed = at_most("ratio", 1, 2), at_most("ratio", 2, 1)
    assert Report([], [met, met]).met
    assert not Report([], [met, missed]).met


def test_tables_show_every_figure_and_mark_missed_bars() -> None:
    out = io.StringIO()
    print_report(
        Report(ROWS, [at_most("overhead", 2.0, 1.0, disturbed=True)], "a machine"), Console(file=out, width=100)
    )
    text = out.getvalue()
    for shown in (
        "gpt",
        "1.25",
        "llama",
        "us_per_instruction",
        "40",
        "overhead, at most",
        "no, disturbed",
        "a machine",
    ):
        assert shown in text, f"{shown!r} is missing from\n{text}"
