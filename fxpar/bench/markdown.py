"""Reports of several benchmarks as Markdown: one row for every goal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fxpar.bench.report import Bar
from fxpar.errors import UnreadableReportError

_HEAD = ("| command | measured | goal | value | reached |", "|---|---|--:|--:|---|")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one run of a benchmark wrote with --json: the command, its bars, and the machine."""

    command: str
    machine: str
    bars: Sequence[Bar]


def read_report(path: Path) -> Recorded:
    """The report in a file.

    Raises:
        UnreadableReportError: there is no such file, or it is not the JSON of a report.
    """
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
        return Recorded(found["command"], found["machine"], [Bar(**bar) for bar in found["bars"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableReportError(str(path), str(error)) from error


def markdown_of(reports: Sequence[Recorded]) -> str:
    """A table for each machine, with all goals of its reports, in the order of the reports."""
    by_machine = sorted(reports, key=lambda report: report.machine)
    tables = (
        "\n".join([f"Measured on {machine}:", "", *_HEAD, *(row for report in found for row in _rows(report))])
        for machine, found in groupby(by_machine, key=lambda report: report.machine)
    )
    return "\n\n".join(tables)


def _rows(report: Recorded) -> Iterator[str]:
    for bar in report.bars:
        # A bar's name ends in the kind of its goal: "at most", "at least" or "exactly".
        name, _, bound = bar.name.rpartition(", ")
        reached = ("yes" if bar.met else "**no**") + (", disturbed" if bar.disturbed else "")
        yield f"| `{report.command}` | {name} | {bound} {bar.goal:.4g} | {bar.value:.4g} | {reached} |"
