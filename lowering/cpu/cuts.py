"""What chunks pieces are moved in, as the fractions of a piece at which they end.

Nothing hides what is done with the last chunk that comes, or before the first is sent: so these are small. The others
are not, since products of few rows take longer for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_MOST_HALVINGS = 3
_FEWEST_ROWS = 128
# Messages of fewer bytes cost more than they bring.
_FEWEST_BYTES = 1 << 15
_MOST_SENT = 4


def gathered_ends(hosts: Sequence[int], piece: Tensor, dim: int) -> list[float]:
    """Of pieces that are gathered in `dim`; on a single host, each is there at once."""
    if len(set(hosts)) == 1:
        return [1.0]
    smallest = max(1, min(piece.shape[dim] // _FEWEST_ROWS, piece.nbytes // _FEWEST_BYTES))
    halvings = min(_MOST_HALVINGS, smallest.bit_length() - 1)
    return [*(1 - 0.5**i for i in range(1, halvings + 1)), 1.0]


def scattered_ends(hosts: Sequence[int], piece: Tensor, dim: int) -> list[float]:
    """Of pieces that are scattered in `dim`; on a single host, each is written where it belongs."""
    if len(set(hosts)) == 1:
        return [1.0]
    count = max(1, min(piece.shape[dim] // _FEWEST_ROWS, piece.nbytes // _FEWEST_BYTES, _MOST_SENT))
    return [(i + 1) / count for i in range(count)]
