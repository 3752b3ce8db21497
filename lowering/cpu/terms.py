"""A rank's partial product, which is summed over ranks piece by piece; computed one chunk at a time."""

from __future__ import annotations

from torch import Tensor

from fxpar.ir import fused_ops
from fxpar.lowering.cpu.multiply import SharedFactor, multiply, product_shape
from fxpar.lowering.cpu.pieces import Chunk, Pieces


class Terms:
    """A rank's left @ right + bias, divided into pieces in the dim that `form`, a `ScatterForm`, names."""

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor | None, form: str, pieces: Pieces) -> None:
        self.pieces = pieces
        self.dim = fused_ops.SCATTERED_DIM[form]
        self.shape = product_shape(left, right)
        self.dtype = left.dtype
        self._is_transposed = form == "columns"
        self._has_matrices = form == "matrices"
        self._left, self._right = (right.mT, left.mT) if self._is_transposed else (left, right)
        self._shared = None if self._has_matrices else SharedFactor(self._right)
        self._bias = None if bias is None else bias.expand(self.shape)

    def compute(self, part: int, chunk: Chunk, out: Tensor, *, adds: bool = False) -> None:
        """Write a chunk of the piece of `part`, (outer, ..., rows, ...), to `out`; with `adds`, add it to `out`."""
        dim = 0 if self._has_matrices else -2
        left = self.pieces.box(self._left, dim, part, chunk)
        right = self._shared or self.pieces.box(self._right, 0, part, chunk)
        bias = None if self._bias is None else self.pieces.box(self._bias, self.dim, part, chunk)
        if self._is_transposed:
            multiply(out.mT, left, right, None if bias is None else bias.mT, adds=adds)
        else:
            multiply(out, left, right, bias, adds=adds)
