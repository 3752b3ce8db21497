"""A right factor that several matrix products share."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.lowering.cpu.one_product import multiply_one, put

# With fewer rows, reading the factor once per product costs more than one large product and a copy of the result.
_FEW_ROWS = 32


class SharedFactor:
    """The right factor (k, n) of several products, or a batch of such factors."""

    def __init__(self, right: Tensor) -> None:
        self._right = right

    def multiply(self, out: Tensor, left: Tensor, *, adds: bool = False) -> None:
        """out[i] = left[i] @ right for every i; with `adds`, out[i] += that.

        Args:
            out: (outer, rows, n) or (outer, batch, rows, n), with any strides; float32 for half-precision factors, too.
            left: (outer, rows, k), or (outer, batch, rows, k).
        """
        if out.dim() == 3 and len(out) > 1 and out.shape[-2] < _FEW_ROWS:
            put(out, torch.mm(left.flatten(0, 1), self._right).view(out.shape), adds=adds)
            return
        for of_out, of_left in zip(out.unbind(), left.unbind(), strict=True):
            multiply_one(of_out, of_left, self._right, adds=adds)
