"""The terminal of rank 0: what is being done, while it is done, and a line for each thing that is finished."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from fxpar.environment import is_first_rank, is_quiet
from fxpar.progress.phases import current_phases, logger, phase, watching

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def showing(what: str) -> Iterator[None]:
    """A context whose phases are shown, with the time since it began; nothing of that stays on the screen.

    It is a phase itself, and within another it is no more than that. Nothing is shown on other ranks than the first,
    where stderr is no terminal, or if FXPAR_QUIET is set.
    """
    if _shown or not _is_watched():
        with phase(what):
            yield
        return
    display = _Display()
    _shown.append(display)
    try:
        with display.bar, watching(display.show), phase(what):
            yield
    finally:
        _shown.remove(display)


def say(text: str) -> None:
    """Show `text` as what the current phase is doing now, until it says something else or ends."""
    for display in _shown:
        display.say(text)


def is_showing() -> bool:
    """Whether phases are shown now."""
    return bool(_shown)


def tell(fact: str) -> None:
    """Tell, on the first rank, that something is finished: a line of the log at INFO, or else one on the terminal."""
    if not _is_first():
        return
    logger().info(fact, stacklevel=2)
    if _is_watched() and not logger().isEnabledFor(logging.INFO):  # whoever reads the log need not read it twice
        print(f"fxpar: {fact}", file=sys.stderr)  # above what is shown, which rich sees to


def _is_watched() -> bool:
    return _is_first() and not is_quiet() and sys.stderr is not None and sys.stderr.isatty()


def _is_first() -> bool:
    """Whether this is rank 0, as the launcher says, or, under one that says nothing, the world."""
    return is_first_rank() and not (dist.is_initialized() and dist.get_rank() > 0)


class _Display:
    """One line on the terminal, which rich draws anew some times per second in a thread of its own."""

    def __init__(self) -> None:
        self.bar = _bar()
        self._task = self.bar.add_task("")
        self._said: tuple[tuple[str, ...], str] = ((), "")

    def show(self, phases: tuple[str, ...], *, refresh: bool = False) -> None:
        """Show the phases, and what one of them has said."""
        speaker, text = self._said
        if speaker and phases[: len(speaker)] == speaker:
            phases = (*speaker, text, *phases[len(speaker) :])
        self.bar.update(self._task, description=", ".join(phases), refresh=refresh)

    def say(self, text: str) -> None:
        """Show `text` behind the current phases."""
        phases = current_phases()
        self._said = phases, text
        self.show(phases, refresh=True)


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
    # What is printed meanwhile appears above the line, also on stdout, unless that goes elsewhere.
    return Progress(
        SpinnerColumn(),
        text,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )


_shown: list[_Display] = []
"""The display of this process, while there is one."""
