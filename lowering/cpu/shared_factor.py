"""A right factor that several products have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.lowering.cpu.one_product import multiply_one, put

# With fewer rows, going through the factor for each product costs more than copying the products once.
_FEW_ROWS = 32


class SharedFactor:
    """The right factor (k, n) of products, or a batch of such."""

    def __init__(self, right: Tensor) -> None:
        self._right = right

    def multiply(self, out: Tensor, left: Tensor, *, adds: bool = False) -> None:
        """out[i] = left[i] @ right for every i, or what is more than `out` where it `adds`.

        Args:
            out: (outer, rows, n) or (outer, batch, rows, n), with any strides; halves may be multiplied to floats.
            left: (outer, rows, k), or with the batch.
        """
        if out.dim() == 3 and len(out) > 1 and out.shape[-2] < _FEW_ROWS:
            put(out, torch.mm(left.flatten(0, 1), self._right).view(out.shape), adds=adds)
            return
        for of_out, of_left in zip(out.unbind(), left.unbind(), strict=True):
            multiply_one(of_out, of_left, self._right, adds=adds)
