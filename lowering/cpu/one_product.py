"""A matrix product that is written directly to its destination."""

from __future__ import annotations

import torch
from torch import Tensor

# If a product is much wider than high, BLAS reads the whole right factor for few rows, and is bound by memory. Blocks
# of this many columns stay in a cache: they take up to a quarter less time.
_FEWEST_COLUMNS = 512
_COLUMNS_PER_ROW = 2


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
