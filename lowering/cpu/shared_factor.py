"""A right factor that several products have in common: where that pays, it is packed once for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.lowering.cpu.one_product import multiply_one, put
from fxpar.lowering.cpu.packed import FEW_ROWS, Packed, can_multiply, order_of, packing_mkl


class SharedFactor:
    """The right factor (k, n) of products, or a batch of such."""

    def __init__(self, right: Tensor) -> None:
        self._right = right
        self._mkl = packing_mkl() if can_multiply(right) else None
        self._packed: dict[tuple[int, int], Packed] = {}

    def multiply(self, out: Tensor, left: Tensor, *, adds: bool = False) -> None:
        """out[i] = left[i] @ right for every i, or what is more than `out` where it `adds`.

        Args:
            out: (outer, rows, n) or (outer, batch, rows, n), with any strides; halves may be multiplied to floats.
            left: (outer, rows, k), or with the batch.
        """
        if out.dim() == 3 and len(out) > 1 and out.shape[-2] < FEW_ROWS:
            put(out, torch.mm(left.flatten(0, 1), self._right).view(out.shape), adds=adds)
            return
        for of_out, of_left in zip(out.unbind(), left.unbind(), strict=True):
            packed = self._pack(of_out, of_left)
            if packed is None:
                multiply_one(of_out, of_left, self._right, adds=adds)
            else:
                packed.multiply(of_out, of_left, adds=adds)

    def _pack(self, out: Tensor, left: Tensor) -> Packed | None:
        """This factor packed for such a product, where that is of use; MKL wants to know the number of rows."""
        order = order_of(out.stride())
        if self._mkl is None or order is None or out.dtype != left.dtype or not can_multiply(left):
            return None
        key = (order, len(left))
        if key not in self._packed:
            self._packed[key] = Packed(self._mkl, self._right, *key)
        return self._packed[key]
