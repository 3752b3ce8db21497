"""Settings of this process's allocator, which make times repeatable."""

from __future__ import annotations

import ctypes
import sys

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process reuse freed memory instead of returning it to the kernel, if its allocator is glibc's.

    By default every large tensor is new memory, which the kernel fills with zeros page by page. How often that happens
    depends on the order of allocations; the noise would exceed the differences to be measured. Training on CPUs usually
    uses an allocator that keeps memory anyhow.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def prepare_memory() -> None:
    """`keep_freed_memory`, and flush denormals: in memory that is never written they would slow down products."""
    keep_freed_memory()
    torch.set_flush_denormal(True)
