"""A lock among the processes of a machine, so that one does a piece of work and the others find its result."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path


@contextmanager
def machine_lock(folder: Path, work: str) -> Iterator[None]:
    """Hold the lock of `work`, any text that identifies the work, among the processes that use `folder`.

    The kernel releases the lock when its holder ends, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{sha256(work.encode()).hexdigest()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
