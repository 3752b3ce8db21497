"""The rate and message cost of a host's interface, and the number of chunks of a transfer that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Network:
    """One interface per host: `bytes_per_us` in each direction, and a cost of `chunk_us` for each message."""

    bytes_per_us: float
    chunk_us: float

    def __post_init__(self) -> None:
        assert self.bytes_per_us > 0 and self.chunk_us > 0, f"nothing is free: {self}"

    @property
    def ahead_bytes(self) -> int:
        """How many bytes may be in flight, so that the interface stays busy until answers have come back."""
        return int(self.bytes_per_us * 20_000)

    def time_us(self, num_bytes: float) -> float:
        """How long the interface is busy with `num_bytes`."""
        return num_bytes / self.bytes_per_us

    def chunk_count(self, num_bytes: int, num_hops: int) -> int:
        """The number of chunks of a transfer that `num_hops` interfaces send, one after another.

        With K chunks of t microseconds together, a chain of A hops takes t (K + A - 1) / K (Zhuang et al., section
        3.1), and K chunks cost K `chunk_us` more. The result is the K of the least sum; small messages are not split.
        """
        best = math.sqrt(max(num_hops - 1, 0) * self.time_us(num_bytes) / self.chunk_us)
        return max(1, min(MAX_CHUNKS, num_bytes, round(best)))


LOOPBACK = Network(bytes_per_us=2e3, chunk_us=100.0)
"""The network of processes of one machine, over sockets."""
