"""Tell what was being communicated when a connection to another rank broke, or what it is that takes long."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from fxpar._torch import is_connection_error
from fxpar.errors import PeerLostError


@contextmanager
def naming_lost_peers(value: str) -> Iterator[None]:
    """Inside, an error of c10d that says that a connection broke becomes a PeerLostError; any other error stays.

    Args:
        value: what is being communicated.

    Raises:
        PeerLostError: another rank died, ended, or took too long.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        raise PeerLostError(value, None, str(error)) from error


@contextmanager
def warning_of_a_long_wait(awaited: str, after_s: float = 60.0) -> Iterator[None]:
    """Inside, a wait of `after_s` seconds is warned of once, with what is `awaited`; it goes on."""
    timer = Timer(after_s, warnings.warn, [f"has waited {after_s:g} s for {awaited}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
