"""A step that fails on one rank leaves the others amid it: nothing runs after it in the same world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fxpar.errors import BrokenWorldError


@contextmanager
def breaking_its_world() -> Iterator[None]:
    """Inside is a step of several ranks, which may end in any error; none begins after one that did.

    Others may have sent, or still send, what the failed step would have received: the next would take it for its own.

    Raises:
        BrokenWorldError: an earlier step failed on this rank.
    """
    world = dist.group.WORLD
    assert world is not None, "a step of several ranks has a default process group"
    if world in _failures:
        raise BrokenWorldError(_failures[world])
    try:
        yield
    except BaseException as error:  # an interrupt, too
        _failures[world] = f"{type(error).__name__}: {error}"
        raise


_failures: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""What ended the step that failed, by world."""
