"""Fit a latency and a rate to the times of messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

_LEAST_US = 1e-3
"""The smallest latency returned: it must be positive, and clocks do not resolve less."""


@dataclass(frozen=True, slots=True)
class Line:
    """A message of b bytes takes `latency_us` + b / `bytes_per_us`."""

    latency_us: float
    bytes_per_us: float

    def time_us(self, num_bytes: float) -> float:
        """The time of a message."""
        return self.latency_us + num_bytes / self.bytes_per_us


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through points (bytes, microseconds) with the least relative errors.

    Neither latency nor time per byte is negative. If the fit has no time per byte, the rate is the highest of any
    message.
    """
    sizes, times = np.asarray(points, dtype=float).T
    # Rows are divided by their times, so that errors are relative; sizes by the largest message, so that both unknowns
    # are microseconds.
    most = sizes.max()
    (latency, whole), _ = nnls(np.stack([1 / times, sizes / most / times], axis=1), np.ones_like(times))
    rate = most / whole if whole > 0 else float((sizes / times).max())
    return Line(max(float(latency), _LEAST_US), float(rate))
