"""Explain the step of a dump: where its time goes, and what limits it, as its report does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.limits.find_limits import find_limits
from fxpar.analysis.predicted_parts import predicted_parts
from fxpar.world.mesh import sizes_text


def print_dump(step: DumpedStep, console: Console) -> None:
    """Print a table of the parts of the predicted step, and what limits it in words."""
    parts = predicted_parts(step)
    mesh = sizes_text(step.facts.sizes)
    console.print(f"{mesh}, {step.facts.microbatches} microbatches, {step.facts.schedule_name}", highlight=False)
    table = Table("part", title="what the step's time is spent on")
    for column in ("ms", "share"):
        table.add_column(column, justify="right")
    for part in parts.parts:
        table.add_row(part.label, f"{1e-3 * part.time_us:,.3f}", f"{parts.share(part.time_us):.1%}")
    table.add_section()
    table.add_row("the step, predicted", f"{1e-3 * step.step_us:,.3f}", "100.0%")
    if step.measured is not None:
        table.add_row("the step, as measured last", f"{1e-3 * step.measured.makespan_us:,.3f}", "")
    console.print(table)
    for limit in find_limits(step):
        console.print(f"{limit.share:.1%}  {limit.title}\n  {limit.finding}\n  {limit.advice}", highlight=False)


def dump_to_json(step: DumpedStep) -> dict[str, Any]:
    """The same; times are in microseconds, shares are of the step, or of the memory of a rank."""
    return {
        "step_us": step.step_us,
        "measured_us": None if step.measured is None else step.measured.makespan_us,
        "parts_us": {part.name: part.time_us for part in predicted_parts(step).parts},
        "limits": [asdict(limit) for limit in find_limits(step)],
    }
