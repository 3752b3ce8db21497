"""A right factor that several products have in common: it is packed once, where each product would pack it anew."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from fxpar._torch import packed_sgemm

# With fewer rows, packing the factor for each product costs more than copying the products once.
_FEW_ROWS = 32

# Values of the enumerations of CBLAS, and MKL's own among them.
_ROW_MAJOR, _COLUMN_MAJOR = 101, 102
_AS_IT_IS, _TRANSPOSED, _PACKED = 111, 112, 151
_RIGHT = 162


class SharedFactor:
    """The right factor (k, n) of products, or a batch of such."""

    def __init__(self, right: Tensor) -> None:
        self._right = right
        self._mkl = packed_sgemm() if _is_large_float(right) else None
        self._packed: dict[tuple[int, int], _Packed] = {}

    def multiply(self, out: Tensor, left: Tensor, *, adds: bool = False) -> None:
        """out[i] = left[i] @ right for every i, or what is more than `out` where it `adds`.

        Args:
            out: (outer, rows, n) or (outer, batch, rows, n), with any strides; halves may be multiplied to floats.
            left: (outer, rows, k), or with the batch.
        """
        if out.dim() == 3 and len(out) > 1 and out.shape[-2] < _FEW_ROWS:
            _put(out, torch.mm(left.flatten(0, 1), self._right).view(out.shape), adds=adds)
            return
        for of_out, of_left in zip(out.unbind(), left.unbind(), strict=True):
            packed = self._pack(of_out, of_left)
            if packed is None:
                multiply_one(of_out, of_left, self._right, adds=adds)
            else:
                packed.multiply(of_out, of_left, adds=adds)

    def _pack(self, out: Tensor, left: Tensor) -> _Packed | None:
        """This factor packed for such a product, where that is of use; MKL wants to know the number of rows."""
        order = _order(out.stride())
        if self._mkl is None or order is None or out.dtype != left.dtype or not _is_large_float(left):
            return None
        key = (order, len(left))
        if key not in self._packed:
            self._packed[key] = _Packed(self._mkl, self._right, *key)
        return self._packed[key]


def multiply_one(out: Tensor, left: Tensor, right: Tensor, *, adds: bool = False) -> None:
    """out = left @ right, matrices or batches of them, or what is more than `out` where it `adds`."""
    batch = out.shape[:-2]
    left, right = left.expand(*batch, *left.shape[-2:]), right.expand(*batch, *right.shape[-2:])
    if out.dtype != left.dtype:
        _put(out, left @ right, adds=adds)
    elif out.dim() == 2:
        torch.addmm(out, left, right, out=out) if adds else torch.mm(left, right, out=out)
    else:
        torch.baddbmm(out, left, right, out=out) if adds else torch.bmm(left, right, out=out)


def _put(out: Tensor, product: Tensor, *, adds: bool) -> None:
    if adds:
        out.add_(product)
    else:
        out.copy_(product)


class _Packed:
    """A factor as MKL wants it for products of so many rows that are written in this order."""

    def __init__(self, mkl: ctypes.CDLL, right: Tensor, order: int, rows: int) -> None:
        self._mkl = mkl
        self._order = order
        self._sizes = _longs(rows, right.shape[1], right.shape[0])
        self._memory = torch.empty(mkl.cblas_sgemm_pack_get_size(_RIGHT, *self._sizes), dtype=torch.uint8)
        transposed, stride = _as_stored(right.stride(), order)
        mkl.cblas_sgemm_pack(
            *(order, _RIGHT, transposed, *self._sizes),
            *(ctypes.c_float(1), _pointer(right), stride, _pointer(self._memory)),
        )

    def multiply(self, out: Tensor, left: Tensor, *, adds: bool) -> None:
        """out = left @ right, or what is more than `out` where it `adds`."""
        transposed, stride = _as_stored(left.stride(), self._order)
        (_, of_out), n = _as_stored(out.stride(), self._order), self._sizes[1]
        self._mkl.cblas_sgemm_compute(
            *(self._order, transposed, _PACKED, *self._sizes),
            *(_pointer(left), stride, _pointer(self._memory), n, ctypes.c_float(adds), _pointer(out), of_out),
        )


def _is_large_float(factor: Tensor) -> bool:
    """Whether packing is possible with such a factor, and worth it."""
    return (
        factor.dim() == 2
        and factor.dtype == torch.float32
        and min(factor.shape) >= _FEW_ROWS
        and _order(factor.stride()) is not None
    )


@lru_cache
def _order(strides: tuple[int, ...]) -> int | None:
    """How CBLAS calls the order in which a matrix lies in memory; None if neither its rows nor columns are dense."""
    if len(strides) != 2 or 0 in strides:
        return None
    if strides[1] == 1:
        return _ROW_MAJOR
    return _COLUMN_MAJOR if strides[0] == 1 else None


@lru_cache
def _as_stored(strides: tuple[int, ...], order: int) -> tuple[int, ctypes.c_long]:
    """Whether a matrix is transposed where others lie in memory in `order`, and the stride of its rows or columns."""
    own = _order(strides)
    return _AS_IT_IS if own == order else _TRANSPOSED, ctypes.c_long(strides[0 if own == _ROW_MAJOR else 1])


def _longs(*values: int) -> tuple[ctypes.c_long, ...]:
    """As wide as MKL's integers at most are; where they are narrower, they are the lower halves."""
    return tuple(map(ctypes.c_long, values))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
