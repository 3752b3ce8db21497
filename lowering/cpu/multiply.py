"""Matrix products that are written directly to their destination."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.core.sum import total_of
from fxpar.lowering.cpu.one_product import multiply_one
from fxpar.lowering.cpu.shared_factor import SharedFactor


def product_shape(left: Tensor, right: Tensor) -> list[int]:
    """The shape of left @ right, matrices or batches of them."""
    batches = left.shape[:-2], right.shape[:-2]
    # There seldom is a batch, and torch.broadcast_shapes takes longer than everything else here.
    batch = torch.broadcast_shapes(*batches) if any(batches) else ()
    return [*batch, left.shape[-2], right.shape[-1]]


def multiply(
    out: Tensor, left: Tensor, right: Tensor | SharedFactor, bias: Tensor | None, *, adds: bool = False
) -> None:
    """out[i] = left[i] @ right[i] + bias[i] for every i; with `adds`, out[i] += that.

    Args:
        out: (outer, rows, n) or (outer, batch, rows, n), with any strides; float32 for half-precision factors, too.
        left: (outer, rows, k), or (outer, batch, rows, k).
        right: (outer, k, n), or (outer, batch, k, n); or one factor for all i, which has no batch either.
        bias: of the shape of `out`.
    """
    if isinstance(right, SharedFactor):
        right.multiply(out, left, adds=adds)
    else:
        for of_out, of_left, of_right in zip(out.unbind(), left.unbind(), right.unbind(), strict=True):
            multiply_one(of_out, of_left, of_right, adds=adds)
    if bias is not None:
        out.add_(bias)


class SumOfProducts:
    """Makes `out` the sum of products, added up in the order of the calls; half precision is added up in float32."""

    def __init__(self, out: Tensor) -> None:
        self._out = out
        self._total = total_of(out)
        self._is_begun = False

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right: (k, n), or with a batch."""
        multiply_one(self._total, left, right, adds=self._is_begun)
        self._is_begun = True

    def finish(self) -> None:
        """Write the sum to `out`."""
        if self._total is not self._out:
            self._out.copy_(self._total)
