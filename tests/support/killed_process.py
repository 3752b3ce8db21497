"""Python processes that tests start in order to kill them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(module: str, function: str) -> Iterator[subprocess.Popen[str]]:
    """A process that calls `function` of `module`, with its output to read from; it is killed in the end."""
    script = f"from {module} import {function}; {function}()"
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """What the process, or one that it started, says next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.endswith("\n"), "it ended; its errors are shown below"
    return line.strip()


def kill_and_await_end_of_all(process: subprocess.Popen[str]) -> None:
    """Kill the process alone. What it has started has the same output open: when that is closed, all have ended.

    Raises:
        subprocess.TimeoutExpired: some still run.
    """
    process.kill()
    process.communicate(timeout=60)
