"""Timestamps: from the host's clock, or from CUDA events where the host only launches what a device computes."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Records timestamps, and converts them to times later."""

    def now(self) -> Any:
        """A timestamp of now."""

    def us(self, moment: Any) -> float:
        """The timestamp in microseconds of the wall clock; this may wait until the device has reached it."""


class HostClock:
    """Timestamps of this process."""

    def __init__(self) -> None:
        self._epoch_us = 1e6 * time.time() - 1e-3 * time.perf_counter_ns()

    def now(self) -> int:
        """In nanoseconds of a monotonic clock."""
        return time.perf_counter_ns()

    def us(self, moment: int) -> float:
        """See `Clock`."""
        return self._epoch_us + 1e-3 * moment


class CudaClock:
    """Timestamps at which the current stream reached a point. Making a clock synchronizes with the device."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._epoch_us, self._epoch = 1e6 * time.time(), self.now()

    def now(self) -> torch.cuda.Event:
        """An event recorded in the stream; this does not wait."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, moment: torch.cuda.Event) -> float:
        """See `Clock`."""
        moment.synchronize()
        return float(self._epoch_us + 1e3 * self._epoch.elapsed_time(moment))


def clock_of(device_type: str) -> Clock:
    """The clock that times what runs on devices of this type."""
    return CudaClock() if device_type == "cuda" else HostClock()
