"""What the interface of a host can do, and into how many chunks that cuts a transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Network:
    """One interface per host: `bytes_per_us` in each direction, and `chunk_us` for every message besides."""

    bytes_per_us: float
    chunk_us: float

    def __post_init__(self) -> None:
        assert self.bytes_per_us > 0 and self.chunk_us > 0, f"nothing is free: {self}"

    @property
    def ahead_bytes(self) -> int:
        """How much may be under way at once, so that an interface is busy while news of arrivals travels back."""
        return int(self.bytes_per_us * 20_000)

    def time_us(self, num_bytes: float) -> float:
        """How long the interface is busy with `num_bytes`."""
        return num_bytes / self.bytes_per_us

    def chunk_count(self, num_bytes: int, num_hops: int) -> int:
        """Into how many chunks to cut what `num_hops` interfaces pass on, one after another.

        With K chunks of t microseconds together a chain of A hops takes t (K + A - 1) / K (Zhuang et al., section 3.1),
        and K chunks cost K `chunk_us` more. The sum is least at the K given here; small messages stay whole.
        """
        best = math.sqrt(max(num_hops - 1, 0) * self.time_us(num_bytes) / self.chunk_us)
        return max(1, min(MAX_CHUNKS, num_bytes, round(best)))


LOOPBACK = Network(bytes_per_us=2e3, chunk_us=100.0)
"""Of processes of one machine, over sockets."""
