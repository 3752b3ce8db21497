"""How a kernel cuts its product, and what of that is worth trying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of m x n whose sums take k terms at a time; `band` row tiles are walked together, for the cache's sake.

    warps, stages: threads per program in units of 32, and how many blocks of k are loaded ahead.
    descriptors: whether factors are loaded by the tensor memory accelerator (sm_90 and newer).
    programs: how many run at a time on one multiprocessor.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    descriptors: bool = False
    programs: int = 1
    band: int = 8


# No kernel spills registers with these, on sm_80, sm_90 or sm_100: compiled for all of them, in the order of size, by
# Triton 3.7. What Triton 3.6 is shipped with spills 8 bytes in two of the small ones.
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
"""What the kernels multiply; sums are in float32."""

Op: TypeAlias = Literal["gather", "scatter"]


def tilings(op: Op, dtype: torch.dtype, compute_capability: int, *, vectors: bool, matrices: int) -> tuple[Tiling, ...]:
    """What may be best for factors of `dtype` on a device of `compute_capability` (90 is sm_90).

    vectors: see `come_in_vectors`; where they do not, loads take so many registers that only small tiles are left.
    matrices: how many products there are; descriptors are of one.
    """
    if not vectors:
        return _ELEMENTWISE
    if dtype == torch.float32:
        return _FLOAT
    by_pointers = (*_HALF_GATHERED, *_HALF) if op == "gather" else _HALF
    return (*_HALF_DESCRIPTORS, *by_pointers) if compute_capability >= 90 and matrices == 1 else by_pointers
