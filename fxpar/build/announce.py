"""Tell what was compiled, and why: on the terminal, or by `logging.getLogger("fxpar").setLevel(logging.INFO)`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from fxpar.build.task import Task
from fxpar.progress.display import showing, tell


class Origin(Enum):
    """Where what a step runs comes from."""

    COMPILED = "compiled {}"
    EARLIER_LAUNCH = "loaded {} that an earlier launch compiled"
    TRAINING = "took the forwards of the training step for {}"


@dataclass(slots=True)
class Announcement:
    """What is found out about a step while it is built."""

    origin: Origin = Origin.COMPILED


@contextmanager
def announced(task: Task) -> Iterator[Announcement]:
    """Show on the first rank that a step is built within, then tell which, why, and how long that took."""
    compiled = task.distribution.compiled
    own = task.with_backward, task.arguments
    start, reason, announcement = time.perf_counter(), _reason(own, compiled), Announcement()
    with showing(f"compile {task.kind}"):
        yield announcement
    compiled.append(own)
    what = announcement.origin.value.format(task.kind)
    tell(f"{what} in {time.perf_counter() - start:.1f} s: {reason}, {task.microbatch}")


def _reason(own: tuple[bool, str], compiled: list[tuple[bool, str]]) -> str:
    """Why the steps that were compiled before do not do."""
    if not compiled:
        return "the first of this model"
    if own in compiled:
        return "other options, or another path through the forward"
    if own[1] not in [arguments for _, arguments in compiled]:
        return "a new shape or dtype of inputs"
    return "the first with gradients" if own[0] else "the first without gradients"
