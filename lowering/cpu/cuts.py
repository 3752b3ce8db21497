"""How many chunks pieces are moved in."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# What is done with the last chunk cannot be hidden behind its transfer: more chunks hide more.
_MOST_ON_THE_WIRE = 8
# But matrices with fewer rows multiply slower, and messages of fewer bytes cost more than they bring.
_FEWEST_ROWS = 64
_FEWEST_BYTES = 1 << 15
# Terms of chunks that fit into a processor's cache are added up there.
_BYTES_ON_A_HOST = 1 << 19


def gathered_chunks(hosts: Sequence[int], shard: Tensor, dim: int) -> int:
    """For pieces like `shard`, gathered in `dim`; of a single host, each is there at once."""
    return 1 if len(set(hosts)) == 1 else _on_the_wire(shard.nbytes, shard.shape[dim])


def scattered_chunks(hosts: Sequence[int], piece_bytes: int, num_rows: int) -> int:
    """For terms of `piece_bytes`, scattered in a dim of which a piece has `num_rows`."""
    if len(set(hosts)) > 1:
        return _on_the_wire(piece_bytes, num_rows)
    return max(1, min(num_rows // _FEWEST_ROWS, piece_bytes // _BYTES_ON_A_HOST))


def _on_the_wire(piece_bytes: int, num_rows: int) -> int:
    return max(1, min(_MOST_ON_THE_WIRE, num_rows // _FEWEST_ROWS, piece_bytes // _FEWEST_BYTES))
