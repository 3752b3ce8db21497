"""Tell what was being communicated when a connection to another rank broke."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
