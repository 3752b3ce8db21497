"""Let gloo's threads come to rest before the interpreter ends.

A thread of gloo that has run a collective first tells whoever waits for it, then drops the tensors, and takes the GIL
for that. If the interpreter ends in between, the process aborts with "terminate called without an active exception",
and torchrun reports a program as failed that has done all its work. It happens once in some thousand exits, more often
where ranks outnumber cores. torch has no call that waits for it, and `destroy_process_group` ends the threads of those
groups alone that nothing refers to any more. So the state of the threads is read from Linux.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

from fxpar._torch.distributed import GLOO_THREAD_NAME

LONGEST_S = 2.0
"""How long to wait at most. Threads whose peers never answer are at rest, too, so only starved ones take long."""

_PAUSE_S = 0.002


@cache
def rest_before_exit() -> None:
    """Let this process wait at its exit until gloo's threads are at rest. Further calls do nothing."""
    atexit.register(_wait)


def _wait() -> None:
    until = time.monotonic() + LONGEST_S
    before = None
    while time.monotonic() < until:
        now = _switches_of_sleepers()
        if now is not None and now == before:
            return
        before = now
        time.sleep(_PAUSE_S)  # without the GIL: a thread that wants it gets it


def _switches_of_sleepers() -> dict[str, str] | None:
    """How often each of gloo's threads has gone to sleep; None if one of them is awake.

    One that waits for the GIL sleeps, too, but only until this thread releases it: its number grows in the meantime.
    """
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        except OSError:  # it has ended
            continue
        if status["Name"] == GLOO_THREAD_NAME:
            if not status["State"].startswith("S"):
                return None
            found[task.name] = status["voluntary_ctxt_switches"]
    return found
