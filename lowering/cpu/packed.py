"""Factors that MKL has packed: products of the same factor need not pack it anew, each for itself."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from fxpar._torch import packed_sgemm

# With fewer rows, packing the factor for each product costs more than copying the products once.
FEW_ROWS = 32

# Values of the enumerations of CBLAS, and MKL's own among them.
_ROW_MAJOR, _COLUMN_MAJOR = 101, 102
_AS_IT_IS, _TRANSPOSED, _PACKED = 111, 112, 151
_RIGHT = 162

# What is tried: a product of few rows, in which packing is a large part.
_TRIAL_ROWS, _TRIAL_SUM, _TRIAL_COLUMNS = 128, 1024, 256
_TRIALS = 7
_CLEARLY_LESS = 0.9


class Packed:
    """A right factor (k, n) as MKL wants it for products of so many rows that are written in this order."""

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

    def multiply(self, out: Tensor, left: Tensor, *, adds: bool = False) -> None:
        """out = left @ right, or what is more than `out` where it `adds`."""
        transposed, stride = _as_stored(left.stride(), self._order)
        (_, of_out), n = _as_stored(out.stride(), self._order), self._sizes[1]
        self._mkl.cblas_sgemm_compute(
            *(self._order, transposed, _PACKED, *self._sizes),
            *(_pointer(left), stride, _pointer(self._memory), n, ctypes.c_float(adds), _pointer(out), of_out),
        )


@lru_cache
def order_of(strides: tuple[int, ...]) -> int | None:
    """How CBLAS calls the order in which a matrix lies in memory; None if neither its rows nor columns are dense."""
    if len(strides) != 2 or 0 in strides:
        return None
    if strides[1] == 1:
        return _ROW_MAJOR
    return _COLUMN_MAJOR if strides[0] == 1 else None


def can_multiply(factor: Tensor) -> bool:
    """Whether MKL multiplies such a factor by, or as, a packed one, and it is large enough to be worth it."""
    return (
        factor.dim() == 2
        and factor.dtype == torch.float32
        and min(factor.shape) >= FEW_ROWS
        and order_of(factor.stride()) is not None
    )


@cache
def packing_mkl() -> ctypes.CDLL | None:
    """MKL, if torch has it and products of packed factors take clearly less time here; it depends on the processor.

    The first time, this takes some milliseconds: it tries both. Their products differ by rounding errors, but a process
    computes all of its own in the way that it found.
    """
    mkl = packed_sgemm()
    if mkl is None:
        return None
    left, right = torch.ones(_TRIAL_ROWS, _TRIAL_SUM), torch.ones(_TRIAL_COLUMNS, _TRIAL_SUM).t()
    out = left.new_empty(_TRIAL_ROWS, _TRIAL_COLUMNS)
    packed = Packed(mkl, right, _ROW_MAJOR, _TRIAL_ROWS)
    trials = [
        (_seconds(lambda: packed.multiply(out, left)), _seconds(lambda: torch.mm(left, right, out=out)))
        for _ in range(_TRIALS)
    ]
    of_packed, of_plain = map(min, zip(*trials, strict=True))
    return mkl if of_packed < _CLEARLY_LESS * of_plain else None


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@lru_cache
def _as_stored(strides: tuple[int, ...], order: int) -> tuple[int, ctypes.c_long]:
    """Whether a matrix is transposed where others lie in memory in `order`, and the stride of its rows or columns."""
    own = order_of(strides)
    return _AS_IT_IS if own == order else _TRANSPOSED, ctypes.c_long(strides[0 if own == _ROW_MAJOR else 1])


def _longs(*values: int) -> tuple[ctypes.c_long, ...]:
    """As wide as MKL's integers at most are; where they are narrower, they are the lower halves."""
    return tuple(map(ctypes.c_long, values))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
