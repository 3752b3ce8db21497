"""Anonymous network namespaces: the kernel destroys each one with the last descriptor or process that holds it.

A namespace has its own devices, addresses and queues. Linux only, and only for users that may administer the network.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from typing import TypeVar

T = TypeVar("T")

# From <linux/sched.h>; Python 3.11 has neither os.unshare nor os.setns.
_CLONE_NEWNET = 0x40000000

_SENT = 8  # the column of sent bytes, after eight columns about received packets


class NetworkNamespace:
    """A new, empty network; it and its devices disappear with `close`, or with this process, however that ends.

    Raises:
        OSError: this process may not make a namespace, or the kernel does not support them.
    """

    def __init__(self) -> None:
        # Python closes the descriptor in every program that this process starts, so nothing else keeps the namespace.
        self._descriptor = _in_new_thread(_open_new)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor.fileno()}"
        """Names the namespace to other processes of this machine, for as long as it exists."""

    def run(self, command: Sequence[str], script: Sequence[str] = ()) -> str:
        """Run `command` inside, with the lines of `script` as its input; returns its output.

        Raises:
            OSError: there is no such command.
            subprocess.CalledProcessError: the command failed.
        """
        return _in_new_thread(lambda: _run_in(self.path, command, "\n".join(script)))

    def close(self) -> None:
        """Release the namespace; processes inside it still hold it."""
        self._descriptor.close()


def enter_network(path: str) -> None:
    """Move this thread, and the threads that it starts, into the namespace at `path`.

    Raises:
        OSError: there is no such namespace, or this process may not enter it.
    """
    with FileIO(path) as descriptor:
        _call_libc("setns", descriptor.fileno(), _CLONE_NEWNET)


def bytes_sent(device: str) -> int:
    """The bytes that `device` of this thread's network has sent since it was made, headers included.

    Raises:
        KeyError: there is no such device.
    """
    with open("/proc/thread-self/net/dev") as table:
        counts = {name.strip(): fields.split() for name, _, fields in (line.partition(":") for line in table)}
    return int(counts[device][_SENT])


def _in_new_thread(work: Callable[[], T]) -> T:
    """Call `work` in a thread of its own, which can change its namespace, and that of its children, and no other's."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def _open_new() -> FileIO:
    _call_libc("unshare", _CLONE_NEWNET)
    return FileIO("/proc/thread-self/ns/net")


def _run_in(path: str, command: Sequence[str], script: str) -> str:
    enter_network(path)
    return subprocess.run(command, input=script, check=True, capture_output=True, text=True).stdout


def _call_libc(function: str, *arguments: int) -> None:
    if ctypes.CDLL(None, use_errno=True)[function](*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
