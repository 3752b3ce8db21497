"""Let one process of a machine do a piece of work that the others then find done."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path


@contextmanager
def machine_lock(folder: Path, work: str) -> Iterator[None]:
    """Hold the lock of `work`, any text that says what it is, among the processes that use `folder`.

    The system gives the lock back when its holder ends, in whatever way: nobody waits for the dead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{sha256(work.encode()).hexdigest()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
