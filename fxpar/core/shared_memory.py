"""Signals and heaps in shared memory: csrc/shared_memory.cpp. Linux only."""

from __future__ import annotations

import os
from ctypes import POINTER, byref, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import finalize

from fxpar.core.library import function
from fxpar.errors import SharedMemoryError

SIGNAL_BYTES = 16
_MAX_WAIT_S = 1e9  # fits in 64 bits as a number of nanoseconds


@dataclass(frozen=True, slots=True)
class Signal:
    """A 64-bit number that only increases, and that threads of any process can wait for.

    It occupies 16 bytes at `address`, zero at first. Release and acquire: a thread that has read a value also sees all
    writes to memory from before that value was set. The memory must stay mapped, and be used as a signal only, until
    every wait on it has returned.
    """

    address: int

    @property
    def value(self) -> int:
        """The last value set."""
        return int(_signal_value()(self.address))

    def set(self, value: int) -> None:
        """Set the value, and wake all waiters; there is a system call only if there are waiters."""
        _signal_set()(self.address, value)

    def wait(self, at_least: int, timeout_s: float) -> bool:
        """Sleep until the value is at least `at_least`; False after `timeout_s`, or on an interrupt before it.

        To go on waiting, call it again: Python's signal handlers run between the calls.
        """
        timeout_ns = int(min(max(timeout_s, 0), _MAX_WAIT_S) * 1e9)
        return bool(_signal_wait()(self.address, at_least, timeout_ns))


class Heap:
    """An allocator of blocks in a sparse file of `capacity` bytes, by offset; it never returns pages to the kernel."""

    def __init__(self, fd: int, capacity: int) -> None:
        self._heap = _heap_create()(fd, capacity)
        finalize(self, _heap_destroy(), self._heap).atexit = False  # threads may still use it

    def allocate(self, num_bytes: int) -> int:
        """The offset of a new block: a multiple of 64 and never 0. The content of the block is undefined.

        Raises:
            SharedMemoryError: the capacity or the machine's memory is exhausted.
        """
        offset: int = _heap_allocate()(self._heap, num_bytes, True)
        if offset < 0:
            committed, in_use = self._usage()
            asked = f"allocate {num_bytes} bytes beside {in_use} in use ({committed} committed)"
            raise SharedMemoryError(asked, os.strerror(-offset))
        return offset

    def reuse(self, num_bytes: int) -> int | None:
        """Like `allocate`, but None if that would need more memory than is committed."""
        offset: int = _heap_allocate()(self._heap, num_bytes, False)
        return offset if offset > 0 else None

    def free(self, offset: int) -> None:
        """Let the block at `offset` be reused."""
        status = _heap_free()(self._heap, offset)
        assert status == 0, f"no block begins at {offset}"

    @property
    def committed_bytes(self) -> int:
        """The memory that was taken from the kernel; it never decreases."""
        return self._usage()[0]

    @property
    def bytes_in_use(self) -> int:
        """The memory of allocated blocks."""
        return self._usage()[1]

    def _usage(self) -> tuple[int, int]:
        committed, in_use = c_uint64(), c_uint64()
        _heap_usage()(self._heap, byref(committed), byref(in_use))
        return committed.value, in_use.value


@cache
def _signal_set() -> Any:
    return function("fxpar_signal_set", None, c_void_p, c_uint64)


@cache
def _signal_value() -> Any:
    return function("fxpar_signal_value", c_uint64, c_void_p)


@cache
def _signal_wait() -> Any:
    return function("fxpar_signal_wait", c_int, c_void_p, c_uint64, c_int64)


@cache
def _heap_create() -> Any:
    return function("fxpar_heap_create", c_void_p, c_int, c_uint64)


@cache
def _heap_destroy() -> Any:
    return function("fxpar_heap_destroy", None, c_void_p)


@cache
def _heap_allocate() -> Any:
    return function("fxpar_heap_allocate", c_int64, c_void_p, c_uint64, c_int)


@cache
def _heap_free() -> Any:
    return function("fxpar_heap_free", c_int, c_void_p, c_uint64)


@cache
def _heap_usage() -> Any:
    return function("fxpar_heap_usage", None, c_void_p, POINTER(c_uint64), POINTER(c_uint64))
