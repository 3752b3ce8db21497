"""How this process's allocator treats what is freed."""

from __future__ import annotations

import ctypes
import sys

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for what it allocates next, where its allocator is glibc's.

    By default every large tensor is new memory of the kernel's, which fills it with zeros page by page. How often that
    happens depends on what was freed when; so it would make more noise than there are differences to measure. Whoever
    trains on CPUs uses an allocator that keeps memory anyhow.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def prepare_memory() -> None:
    """`keep_freed_memory`; and what is left in memory that nothing was received into is as quick to multiply as all."""
    keep_freed_memory()
    torch.set_flush_denormal(True)
