"""From times of messages of several sizes to a latency and a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

_LEAST_US = 1e-3
"""What the shortest latency is taken for: none at all would be no latency, and clocks do not show less."""


@dataclass(frozen=True, slots=True)
class Line:
    """A message of b bytes takes `latency_us` + b / `bytes_per_us`."""

    latency_us: float
    bytes_per_us: float

    def time_us(self, num_bytes: float) -> float:
        """How long a message takes."""
        return self.latency_us + num_bytes / self.bytes_per_us


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through points (bytes, microseconds) whose relative errors are least.

    Neither latency nor time per byte is negative. Where all of the time would be latency, the largest message tells
    the rate.
    """
    sizes, times = np.asarray(points, dtype=float).T
    # Rows are scaled by their times, so that a microsecond counts where it is much of the time; columns by the largest
    # message, so that both unknowns are microseconds.
    most = sizes.max()
    (latency, whole), _ = nnls(np.stack([1 / times, sizes / most / times], axis=1), np.ones_like(times))
    rate = most / whole if whole > 0 else float((sizes / times).max())
    return Line(max(float(latency), _LEAST_US), float(rate))
