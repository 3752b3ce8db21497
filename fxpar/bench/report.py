"""The result of a benchmark: rows of raw figures, and bars, which are figures with goals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TypeAlias

from rich.console import Console
from rich.table import Column, Table

from fxpar.hardware.machine import describe_machine

Row: TypeAlias = Mapping[str, str | int | float | bool]
"""The figures of one configuration; their names end in their units."""

Say: TypeAlias = Callable[[str], None]
"""Shows the user what is being measured now."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and its goal; `disturbed` if other processes took processor time in every round."""

    name: str
    value: float
    goal: float
    met: bool
    disturbed: bool = False


def at_most(name: str, value: float, goal: float, *, disturbed: bool = False) -> Bar:
    """A bar that is met by `goal` and all below it (and not by NaN)."""
    return Bar(f"{name}, at most", value, goal, value <= goal, disturbed)


def at_least(name: str, value: float, goal: float, *, disturbed: bool = False) -> Bar:
    """A bar that is met by `goal` and all above it (and not by NaN)."""
    return Bar(f"{name}, at least", value, goal, value >= goal, disturbed)


def exactly(name: str, value: float, goal: float) -> Bar:
    """A bar that is met by `goal` alone."""
    return Bar(f"{name}, exactly", value, goal, value == goal)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run of a benchmark."""

    rows: Sequence[Row]
    bars: Sequence[Bar]
    machine: str = field(default_factory=describe_machine)

    @property
    def met(self) -> bool:
        """Whether every bar is met."""
        return all(bar.met for bar in self.bars)


def to_json(report: Report, command: str) -> str:
    """A JSON object with the `command` that made the report, its `rows`, `bars` and `machine`."""
    return json.dumps({"command": command, **asdict(report)}, indent=1)


def print_report(report: Report, console: Console) -> None:
    """Print a table for each kind of row, one for the bars, if there are any, and the machine."""
    for columns, rows in groupby(report.rows, key=tuple):
        console.print(_table(columns, rows))
    if report.bars:
        columns = ("name", "value", "goal", "met")
        console.print(_table(columns, [{**asdict(bar), "met": _verdict(bar)} for bar in report.bars]))
    console.print(report.machine, highlight=False)


def _table(columns: Sequence[str], rows: Iterable[Row]) -> Table:
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    return table


def _verdict(bar: Bar) -> str:
    return _cell(bar.met) + (", disturbed" if bar.disturbed else "")


def _cell(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "[bold red]no[/]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
