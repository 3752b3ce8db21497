"""Write `report.html`: the page of a dump, in which all ranks are together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from fxpar.analysis.dumped_step import DumpedStep, read_dump
from fxpar.analysis.graph_texts import packed_graphs, read_graphs
from fxpar.analysis.page_data import page_data
from fxpar.errors import FxparError
from fxpar.report.page import make_page

REPORT = "report.html"


def write_report(folder: Path, output: Path | None = None, measured: Sequence[Path] | None = None) -> Path:
    """Make the page of the dump in `folder`; returns its path, by default `report.html` in that folder.

    Args:
        measured: as of `read_dump`.

    Raises: what `read_dump` raises.
    """
    step = read_dump(folder, measured)
    data = page_data(step) | {"graphs": packed_graphs(read_graphs(folder, _stage_leaders(step)))}
    path = output or folder / REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make_page(f"fxpar: {folder.resolve().name}", data), encoding="utf-8")
    return path


def write_report_if_possible(folder: Path, measured: Sequence[Path]) -> None:
    """The same within training, which goes on without a report: what is wrong with the files is a warning."""
    try:
        write_report(folder, measured=measured)
    except (FxparError, OSError) as error:
        warnings.warn(f"no {REPORT} in {folder}: {error}", stacklevel=2)


def _stage_leaders(step: DumpedStep) -> list[int]:
    """The first rank of each index of the pipe axis: those with the same index run the same graphs on other pieces."""
    num_ranks = len(step.facts.hosts)
    return list(range(0, num_ranks, num_ranks // step.facts.sizes["pipe"]))
