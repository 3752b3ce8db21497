"""Write the report of a dump anew when steps are recorded, with the latest of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fxpar.analysis.write_report import write_report_if_possible


class ReportWriter:
    """Makes the report after the recorded steps 1, 2, 4, 8 and so on: a report takes longer than a small step.

    It is used on the first rank.
    """

    def __init__(self, dump: Path) -> None:
        self._dump = dump
        self._num_steps = 0

    def after_step(self, timelines: Sequence[Path]) -> None:
        """Make the report, if it is time, with these timelines of a step, one for each rank of the pipe axis."""
        self._num_steps += 1
        if not self._num_steps & (self._num_steps - 1):
            write_report_if_possible(self._dump, timelines)
