"""Pieces of whole tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.resharding.tile import Tile


def taken(whole: Tensor, tile: Tile) -> Tensor:
    """The piece of `whole` that a tile describes."""
    for dim, intervals in enumerate(tile.ranges):
        indices = [index for interval in intervals for index in range(*interval)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64, device=whole.device))
    return whole
