"""Say in errors what was being communicated when a connection broke, and in warnings what takes long."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from fxpar._torch.distributed import is_connection_error
from fxpar.errors import LostInCollectiveError, PeerLostError
from fxpar.world.lost_rank import LostRankInterrupt
from fxpar.world.peer_watch import peer_watch


@contextmanager
def naming_lost_peers(value: str, peer: int | None = None) -> Iterator[None]:
    """A context in which errors about a lost rank become a PeerLostError that names `value`; others do not change.

    Such errors are c10d's about a broken connection or an aborted communicator, those of collectives in shared memory,
    and the interrupt of a `PeerWatch`.

    Args:
        value: what is being communicated.
        peer: the rank at the other end, if there is one.

    Raises:
        PeerLostError: another rank ended, or took too long.
    """
    watch = peer_watch()
    if watch is not None:
        watch.begin_wait()
    try:
        yield
    except LostRankInterrupt as interrupt:
        raise interrupt.lost.while_moving(value) from None
    except LostInCollectiveError as error:
        raise PeerLostError(value, error.peer, error.reason) from error
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        if watch is not None and watch.lost is not None:
            raise watch.lost.while_moving(value) from error
        raise PeerLostError(value, peer, str(error)) from error
    finally:
        if watch is not None:
            watch.end_wait()


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
