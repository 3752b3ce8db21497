"""Say in errors what was being communicated when a connection broke, and in warnings what takes long."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from fxpar._torch import is_connection_error
from fxpar.errors import PeerLostError


@contextmanager
def naming_lost_peers(value: str) -> Iterator[None]:
    """A context in which c10d's errors about a broken connection become a PeerLostError; other errors do not change.

    Args:
        value: what is being communicated.

    Raises:
        PeerLostError: another rank ended, or took too long.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        raise PeerLostError(value, None, str(error)) from error


@contextmanager
def warning_of_a_long_wait(awaited: str, after_s: float = 60.0) -> Iterator[None]:
    """A context that warns once, with what is `awaited`, if it lasts longer than `after_s` seconds, and goes on."""
    timer = Timer(after_s, warnings.warn, [f"has waited {after_s:g} s for {awaited}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
