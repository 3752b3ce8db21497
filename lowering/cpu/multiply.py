"""Matrix products that are written directly to their destination."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.core.sum import total_of

# If a product is much wider than high, BLAS reads the whole right factor for few rows, and is bound by memory. Blocks
# of this many columns stay in a cache: they take up to a quarter less time.
_FEWEST_COLUMNS = 512
_COLUMNS_PER_ROW = 2

# With fewer rows, reading the factor once per product costs more than one large product and a copy of the result.
_FEW_ROWS = 32


def product_shape(left: Tensor, right: Tensor) -> list[int]:
    """The shape of left @ right, matrices or batches of them."""
    batches = left.shape[:-2], right.shape[:-2]
    # There seldom is a batch, and torch.broadcast_shapes takes longer than everything else here.
    batch = torch.broadcast_shapes(*batches) if any(batches) else ()
    return [*batch, left.shape[-2], right.shape[-1]]


def multiply_one(out: Tensor, left: Tensor, right: Tensor, *, adds: bool = False) -> None:
    """out = left @ right, matrices or batches of them; with `adds`, out += left @ right.

    Args:
        out: (*batch, rows, n), with any strides; float32 for half-precision factors, too.
        left: (rows, k) or (*batch, rows, k).
        right: (k, n) or (*batch, k, n).
    """
    batch = out.shape[:-2]
    left, right = left.expand(*batch, *left.shape[-2:]), right.expand(*batch, *right.shape[-2:])
    if out.dtype != left.dtype:
        put(out, left @ right, adds=adds)
    elif out.dim() > 2:
        torch.baddbmm(out, left, right, out=out) if adds else torch.bmm(left, right, out=out)
    else:
        columns = max(_FEWEST_COLUMNS, _COLUMNS_PER_ROW * len(out)) * torch.get_num_threads()
        for of_out, of_right in zip(out.split(columns, 1), right.split(columns, 1), strict=True):
            torch.addmm(of_out, left, of_right, out=of_out) if adds else torch.mm(left, of_right, out=of_out)


def put(out: Tensor, product: Tensor, *, adds: bool) -> None:
    """Copy the product to `out`; with `adds`, add it to `out`."""
    if adds:
        out.add_(product)
    else:
        out.copy_(product)


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
