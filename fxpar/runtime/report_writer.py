"""Write the report of a dump anew when steps are recorded, with the latest of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from fxpar.analysis.write_report import write_report_if_possible
from fxpar.schedule import Timeline

_PATIENCE_S = 2.0
"""How long to wait for the timelines of other ranks, which end the step at about the same time."""

_POLL_S = 0.01


def timeline_file(directory: Path, rank: int) -> Path:
    """Where `rank` saves the timeline of its latest recorded step."""
    return directory / f"timeline.rank{rank}.json"


class ReportWriter:
    """Makes the report after the recorded steps 1, 2, 4, 8 and so on: a report takes longer than a small step.

    It is on the first rank. Timelines are saved by every `apart`-th rank, `count` of them.
    """

    def __init__(self, dump: Path, timelines: Path, apart: int, count: int) -> None:
        self._dump = dump
        self._files = [timeline_file(timelines, place * apart) for place in range(count)]
        self._num_steps = 0

    def after_step(self, own: Timeline) -> None:
        """Make the report, if it is time, once all timelines of the step that `own` is of are there.

        Ranks whose files this one cannot see, such as those on another machine without a shared disk, keep it no longer
        than `_PATIENCE_S`; then those of an earlier step are shown, or none.
        """
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1):
            return
        deadline = time.monotonic() + _PATIENCE_S
        while any(self._missing(1e-6 * own.begin_us)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        write_report_if_possible(self._dump, [path for path in self._files if path.exists()])

    def _missing(self, since_s: float) -> Iterator[Path]:
        """The files that are not of a step that began at `since_s` or later."""
        for path in self._files:
            try:
                # A file that is being written lacks its end.
                written_s = path.stat().st_mtime
                is_whole = path.read_bytes().endswith(b"}")
            except OSError:
                written_s, is_whole = 0.0, False
            if written_s < since_s or not is_whole:
                yield path
