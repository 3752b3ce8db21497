"""Files in memory (memfd) and process descriptors (pidfd): csrc/kernel_files.cpp. Linux only.

Python has functions for both, but not if it was built against the headers of an old kernel, as conda's is.
"""

from __future__ import annotations

import os
from ctypes import c_char_p, c_int
from functools import cache
from typing import Any

from fxpar.core.library import function


def memory_file(name: str) -> int:
    """A descriptor, not inherited, of a new empty file in memory; `name` is its name in /proc.

    Raises:
        OSError: the kernel has no memory for it, or does not support such files.
    """
    return _descriptor(_memory_file()(name.encode()))


def process_file(pid: int) -> int:
    """A descriptor, not inherited, of a process; it is readable once the process has ended.

    Raises:
        OSError: the process has ended, or the kernel is older than Linux 5.3.
    """
    return _descriptor(_process_file()(pid))


def _descriptor(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


@cache
def _memory_file() -> Any:
    return function("fxpar_memory_file", c_int, c_char_p)


@cache
def _process_file() -> Any:
    return function("fxpar_process_file", c_int, c_int)
