"""Factors of a product as kernels take them."""

from __future__ import annotations

from torch import Tensor

from fxpar.lowering.triton.tiling import Tiling

_ALIGNMENT_BYTES = 16


def as_matrices(factor: Tensor) -> Tensor:
    """(matrices, rows, columns), a view; a matrix is one of one."""
    return factor if factor.dim() == 3 else factor.unsqueeze(0)


def is_transposed(matrix: Tensor) -> bool:
    """Whether columns, not rows, lie in one piece."""
    return matrix.stride(-1) != 1


def takes_descriptors(left: Tensor, right: Tensor) -> bool:
    """Whether the tensor memory accelerator can load both factors, (matrices, rows, columns)."""
    return left.shape[0] == 1 and all(_is_aligned(factor) for factor in (left, right))


def _is_aligned(factor: Tensor) -> bool:
    rows = factor.mT if is_transposed(factor) else factor
    pitch_bytes = rows.stride(-2) * rows.element_size()
    return rows.stride(-1) == 1 and pitch_bytes % _ALIGNMENT_BYTES == 0 and rows.data_ptr() % _ALIGNMENT_BYTES == 0


def is_whole(rows: int, columns: int, terms: int, tiling: Tiling) -> bool:
    """Whether no tile of the product is cut short."""
    return rows % tiling.m == 0 and columns % tiling.n == 0 and terms % tiling.k == 0


def dense(factor: Tensor) -> Tensor:
    """The factor with rows or columns in one piece, which it most often has: a copy where it has not."""
    return factor if 1 in factor.stride()[-2:] else factor.contiguous()
