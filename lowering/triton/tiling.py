"""Tilings of the kernels: block sizes, warps and stages, and the candidates for the tuner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of m x n whose sums take k terms at a time; `band` row tiles are traversed together, for cache hits.

    warps, stages: threads per program in units of 32, and the number of k blocks that are loaded ahead.
    descriptors: whether factors are loaded by the tensor memory accelerator (sm_90 and newer).
    programs: the number of programs that run concurrently on one multiprocessor.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    descriptors: bool = False
    programs: int = 1
    band: int = 8


# In the order of size. With these, no kernel spills registers on sm_80, sm_90 or sm_100, compiled by Triton 3.7. The
# compiler that Triton 3.6 is shipped with spills 8 bytes in two of the small ones.
_HALF_DESCRIPTORS = (
    Tiling(128, 256, 64, warps=8, stages=4, descriptors=True),
    Tiling(128, 256, 64, warps=8, stages=3, descriptors=True),
    Tiling(128, 128, 64, warps=8, stages=4, descriptors=True),
)
_HALF_GATHERED = (
    Tiling(128, 256, 32, warps=8, stages=4),
    Tiling(128, 128, 64, warps=8, stages=3),
    Tiling(128, 128, 32, warps=8, stages=4),
)
_HALF = (
    Tiling(64, 256, 32, warps=8, stages=4),
    Tiling(64, 128, 64, warps=8, stages=3),
    Tiling(64, 128, 32, warps=8, stages=4),
    Tiling(64, 64, 64, warps=4, stages=4, programs=2),
    Tiling(32, 128, 64, warps=4, stages=4, programs=2),
    Tiling(16, 128, 64, warps=4, stages=4, programs=2),
)
_FLOAT = (
    Tiling(128, 64, 16, warps=8, stages=3),
    Tiling(64, 64, 16, warps=4, stages=3, programs=2),
)
_ELEMENTWISE = (Tiling(32, 32, 16, warps=4, stages=3, programs=2),)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that the kernels multiply; sums are in float32."""

Op: TypeAlias = Literal["gather", "scatter"]


def tilings(op: Op, dtype: torch.dtype, compute_capability: int, *, vectors: bool, matrices: int) -> tuple[Tiling, ...]:
    """The candidates for factors of `dtype` on a device of `compute_capability` (90 is sm_90).

    vectors: see `come_in_vectors`; without vectors, loads take so many registers that only small tiles are possible.
    matrices: the number of products in the batch; a descriptor is of one matrix.
    """
    if not vectors:
        return _ELEMENTWISE
    if dtype == torch.float32:
        return _FLOAT
    by_pointers = (*_HALF_GATHERED, *_HALF) if op == "gather" else _HALF
    return (*_HALF_DESCRIPTORS, *by_pointers) if compute_capability >= 90 and matrices == 1 else by_pointers
