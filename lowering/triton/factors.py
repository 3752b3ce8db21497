"""Shapes and strides of the factors that the kernels accept."""

from __future__ import annotations

from torch import Tensor

from fxpar.lowering.triton.tiling import Tiling

_VECTOR = 16  # Triton specialises on addresses that are multiples of 16 bytes, and integers that are multiples of 16


def as_matrices(factor: Tensor) -> Tensor:
    """A view of shape (matrices, rows, columns); a single matrix is a batch of one."""
    return factor if factor.dim() == 3 else factor.unsqueeze(0)


def is_transposed(matrix: Tensor) -> bool:
    """Whether columns, not rows, are contiguous."""
    return matrix.stride(-1) != 1


def come_in_vectors(left: Tensor, right: Tensor) -> bool:
    """Whether Triton, or the tensor memory accelerator, can load and store all operands in vectors of 16 bytes."""
    return right.shape[-1] % _VECTOR == 0 and all(_comes_in_vectors(factor) for factor in (left, right))


def _comes_in_vectors(factor: Tensor) -> bool:
    rows = factor.mT if is_transposed(factor) else factor
    lengths = (rows.shape[-1], *rows.stride()[:-1])
    return rows.stride(-1) == 1 and all(length % _VECTOR == 0 for length in lengths) and rows.data_ptr() % _VECTOR == 0


def is_whole(rows: int, columns: int, terms: int, tiling: Tiling) -> bool:
    """Whether tiles divide the product evenly."""
    return rows % tiling.m == 0 and columns % tiling.n == 0 and terms % tiling.k == 0


def dense(factor: Tensor) -> Tensor:
    """The factor itself if its rows or columns are contiguous, as they usually are; otherwise a copy."""
    return factor if 1 in factor.stride()[-2:] else factor.contiguous()
