"""Tell what was compiled, and why: `logging.getLogger("fxpar").setLevel(logging.INFO)` shows it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fxpar.build.task import Task
from fxpar.environment import is_first_rank

_log = logging.getLogger("fxpar")


@contextmanager
def announced(task: Task) -> Iterator[None]:
    """Log, on the first rank, what step is compiled within, why, and how long that takes."""
    compiled = task.distribution.compiled
    own = task.with_backward, task.arguments
    start, reason = time.perf_counter(), _reason(own, compiled)
    yield
    compiled.append(own)
    if is_first_rank():
        kind = "a training step" if task.with_backward else "an evaluation"
        arguments = ", ".join(task.arguments.splitlines())
        _log.info("compiled %s in %.1f s (%s), for %s", kind, time.perf_counter() - start, reason, arguments)


def _reason(own: tuple[bool, str], compiled: list[tuple[bool, str]]) -> str:
    """Why the steps that were compiled before do not do."""
    if not compiled:
        return "the first of this model"
    if own in compiled:
        return "other options, or another path through the forward"
    if own[1] not in [arguments for _, arguments in compiled]:
        return "arguments of other shapes or dtypes"
    return "the first with gradients" if own[0] else "the first without gradients"
