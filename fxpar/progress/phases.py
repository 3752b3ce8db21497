"""Phases of the work, by name: told to whoever watches while they last, and to the log when they are over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import ParamSpec, TypeAlias, TypeVar

from fxpar._torch.torch_logs import is_in_torch_logs

P = ParamSpec("P")
T = TypeVar("T")

Watch: TypeAlias = Callable[[tuple[str, ...]], None]
"""Called with the phases that a thread is in, outermost first, whenever one begins or ends."""


_phases: ContextVar[tuple[str, ...]] = ContextVar("the phases that this thread is in", default=())
_watchers: list[Watch] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A context that is the phase `name`; when it ends, a line of the log at DEBUG tells how long it took."""
    outer = _phases.get()
    inner = (*outer, name)
    token, start = _phases.set(inner), time.perf_counter()
    _tell(inner)
    try:
        yield
    finally:
        _phases.reset(token)
        _tell(outer)
        logger().debug("%.3f s: %s", time.perf_counter() - start, ", ".join(inner))


def as_phase(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, each call of which is a phase of its name. For passes, whose names people know from dumps."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with phase(function.__name__):
            return function(*args, **kwargs)

    return run


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Within, `watch` is told of all phases of this process."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def current_phases() -> tuple[str, ...]:
    """The phases that this thread is in, outermost first."""
    return _phases.get()


@cache
def logger() -> logging.Logger:
    """The logger `fxpar`; if TORCH_LOGS names it, the root's handlers do not print its lines once more."""
    found = logging.getLogger("fxpar")
    if is_in_torch_logs(found.name):
        found.propagate = False  # as PyTorch's own loggers
    return found


def _tell(phases: tuple[str, ...]) -> None:
    for watch in tuple(_watchers):
        watch(phases)
