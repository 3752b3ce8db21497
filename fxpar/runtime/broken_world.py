"""No step runs after a failed one in the same world: other ranks may still be in the middle of the failed step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fxpar.errors import BrokenWorldError, PeerLostError
from fxpar.world.peer_watch import peer_watch


@contextmanager
def breaking_its_world() -> Iterator[None]:
    """Run a step of several ranks in this context; if it ends in any error, no later step begins.

    Other ranks may have sent, or still send, messages of the failed step: the next step would receive them as its own.
    Where they would wait for this rank for ever, they are told.

    Raises:
        BrokenWorldError: an earlier step failed on this rank.
        PeerLostError: another rank ended, or failed, before this step.
    """
    world = dist.group.WORLD
    assert world is not None, "a step of several ranks has a default process group"
    if world in _failures:
        raise BrokenWorldError(_failures[world])
    watch = peer_watch()
    try:
        if watch is not None:
            watch.refuse_step()
        yield
    except BaseException as error:  # an interrupt, too
        _failures[world] = f"{type(error).__name__}: {error}"
        if watch is not None and not isinstance(error, PeerLostError):
            watch.report_failure(f"its step has failed ({_failures[world]})")
        raise


_failures: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""The error that ended the failed step, by world."""
