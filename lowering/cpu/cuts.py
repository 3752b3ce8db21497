"""The chunks in which pieces are transferred, as the fractions of a piece at which they end.

The product of the last chunk to arrive, and that of the first chunk to be sent, overlap with no communication, so these
chunks are small. The others are large, since products of few rows take longer per row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_MOST_HALVINGS = 3
_FEWEST_ROWS = 128
# Smaller messages cost more in latency than they gain in overlap.
_FEWEST_BYTES = 1 << 15
_MOST_SENT = 4


def gathered_ends(hosts: Sequence[int], piece: Tensor, dim: int) -> list[float]:
    """For pieces that are gathered in `dim`. On a single host there is one chunk, since pieces are read in place."""
    if len(set(hosts)) == 1:
        return [1.0]
    smallest = max(1, min(piece.shape[dim] // _FEWEST_ROWS, piece.nbytes // _FEWEST_BYTES))
    halvings = min(_MOST_HALVINGS, smallest.bit_length() - 1)
    return [*(1 - 0.5**i for i in range(1, halvings + 1)), 1.0]


def scattered_ends(hosts: Sequence[int], piece: Tensor, dim: int) -> list[float]:
    """For pieces that are scattered in `dim`. On a single host there is one chunk: terms are written in place."""
    if len(set(hosts)) == 1:
        return [1.0]
    count = max(1, min(piece.shape[dim] // _FEWEST_ROWS, piece.nbytes // _FEWEST_BYTES, _MOST_SENT))
    return [(i + 1) / count for i in range(count)]
