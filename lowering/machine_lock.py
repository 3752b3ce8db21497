"""Locks among the processes of a machine, so that one does a piece of work and the others find its result."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO

from fxpar._torch.compiler import inductor_cache


def shared_folder() -> Path:
    """The folder, in Inductor's cache, of what all processes of this user on this machine share: locks and results."""
    return inductor_cache() / "fxpar"


@contextmanager
def machine_lock(folder: Path, work: str) -> Iterator[None]:
    """Hold the lock of `work`, any text that identifies the work, among the processes that use `folder`.

    The kernel releases the lock when its holder ends, however that ends.
    """
    with _lock_file(folder, work) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_machine_lock(folder: Path, work: str, until: ExitStack) -> bool:
    """Take the same lock until `until` is closed, unless it is held; returns whether it was taken."""
    with ExitStack() as opened:
        file = opened.enter_context(_lock_file(folder, work))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        until.enter_context(opened.pop_all())
    return True


def _lock_file(folder: Path, work: str) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{sha256(work.encode()).hexdigest()}.lock").open("w")
