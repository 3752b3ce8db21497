"""What kernels are given in Triton's interpreter: small tilings, rows that have arrived, and pieces of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.lowering.triton.launch import Arrival
from fxpar.lowering.triton.pieces import Segments
from fxpar.lowering.triton.tiling import Tiling

SMALL = Tiling(16, 16, 16, warps=4, stages=2, band=1)
WIDE = Tiling(32, 16, 32, warps=4, stages=2, band=3)
BY_DESCRIPTORS = Tiling(16, 16, 16, warps=4, stages=2, descriptors=True)


def there_at(segments: Segments, rank: int, epoch: int = 1) -> Arrival:
    """All rows have arrived."""
    return Arrival(torch.full((segments.count,), epoch, dtype=torch.int32), epoch, segments, rank, no_tickets())


def no_tickets() -> Tensor:
    """A counter of which no program has taken tickets."""
    return torch.zeros(1, dtype=torch.int32)


def joined(pieces: Tensor, dim: int, outer: int) -> Tensor:
    """The pieces of all ranks, (parts, *piece), at the digits (outer, parts, rows) of a dim of a piece."""
    dim %= pieces.dim() - 1
    return pieces.unflatten(dim + 1, (outer, -1)).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()
