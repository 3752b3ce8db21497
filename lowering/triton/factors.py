"""Factors of a product as kernels take them."""

from __future__ import annotations

from torch import Tensor

from fxpar.lowering.triton.tiling import Tiling

_VECTOR = 16  # bytes of addresses, and elements of lengths: what Triton looks for in arguments


def as_matrices(factor: Tensor) -> Tensor:
    """(matrices, rows, columns), a view; a matrix is one of one."""
    return factor if factor.dim() == 3 else factor.unsqueeze(0)


def is_transposed(matrix: Tensor) -> bool:
    """Whether columns, not rows, lie in one piece."""
    return matrix.stride(-1) != 1


def come_in_vectors(left: Tensor, right: Tensor) -> bool:
    """Whether Triton, or the tensor memory accelerator, can move both factors and the product in pieces of 16 bytes."""
    return right.shape[-1] % _VECTOR == 0 and all(_comes_in_vectors(factor) for factor in (left, right))


def _comes_in_vectors(factor: Tensor) -> bool:
    rows = factor.mT if is_transposed(factor) else factor
    lengths = (rows.shape[-1], *rows.stride()[:-1])
    return rows.stride(-1) == 1 and all(length % _VECTOR == 0 for length in lengths) and rows.data_ptr() % _VECTOR == 0


def is_whole(rows: int, columns: int, terms: int, tiling: Tiling) -> bool:
    """Whether no tile of the product is cut short."""
    return rows % tiling.m == 0 and columns % tiling.n == 0 and terms % tiling.k == 0


def dense(factor: Tensor) -> Tensor:
    """The factor with rows or columns in one piece, which it most often has: a copy where it has not."""
    return factor if 1 in factor.stride()[-2:] else factor.contiguous()
