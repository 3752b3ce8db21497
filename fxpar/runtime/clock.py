"""When things happen: by the host's clock, or where a device computes what hosts only begin, by the device's."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Notes moments now, and says later when they were."""

    def now(self) -> Any:
        """This moment, as the clock notes it."""

    def us(self, moment: Any) -> float:
        """A moment in microseconds of the wall clock; it may wait for the device to have come there."""


class HostClock:
    """Moments at which this process did something."""

    def __init__(self) -> None:
        self._epoch_us = 1e6 * time.time() - 1e-3 * time.perf_counter_ns()

    def now(self) -> int:
        """In nanoseconds of a clock that never goes back."""
        return time.perf_counter_ns()

    def us(self, moment: int) -> float:
        """See `Clock`."""
        return self._epoch_us + 1e-3 * moment


class CudaClock:
    """Moments at which the current stream came to something. Making one waits for the device."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._epoch_us, self._epoch = 1e6 * time.time(), self.now()

    def now(self) -> torch.cuda.Event:
        """An event in the stream, which nothing waits for."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, moment: torch.cuda.Event) -> float:
        """See `Clock`."""
        moment.synchronize()
        return float(self._epoch_us + 1e3 * self._epoch.elapsed_time(moment))


def clock_of(device_type: str) -> Clock:
    """By which to time what runs on devices of this type."""
    return CudaClock() if device_type == "cuda" else HostClock()
