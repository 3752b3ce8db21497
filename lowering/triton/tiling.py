"""How a kernel cuts its product, and what of that is worth trying."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of m x n whose sums take k terms at a time; `band` row tiles are walked together, for the cache's sake.

    warps, stages: threads per program in units of 32, and how many blocks of k are loaded ahead.
    descriptors: whether factors are loaded by the tensor memory accelerator (sm_90 and newer; see `takes_descriptors`).
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


_HALF = (
    Tiling(128, 256, 64, warps=8, stages=3),
    Tiling(128, 128, 64, warps=4, stages=3),
    Tiling(128, 128, 32, warps=4, stages=4),
    Tiling(64, 128, 64, warps=4, stages=3, programs=2),
    Tiling(64, 64, 64, warps=4, stages=4, programs=2),
    Tiling(16, 128, 128, warps=4, stages=4),
)
_HALF_DESCRIPTORS = (
    Tiling(128, 256, 64, warps=8, stages=3, descriptors=True),
    Tiling(128, 256, 64, warps=8, stages=4, descriptors=True),
    Tiling(256, 128, 64, warps=8, stages=3, descriptors=True),
    Tiling(128, 128, 64, warps=4, stages=4, descriptors=True),
    Tiling(64, 128, 128, warps=4, stages=3, descriptors=True),
)
_FLOAT = (
    Tiling(64, 64, 32, warps=4, stages=3),
    Tiling(128, 64, 32, warps=8, stages=3),
    Tiling(32, 64, 32, warps=4, stages=3),
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels multiply; sums are in float32."""


def tilings(dtype: torch.dtype, compute_capability: int) -> tuple[Tiling, ...]:
    """What may be best for factors of `dtype` on a device of `compute_capability` (90 is sm_90)."""
    if dtype == torch.float32:
        return _FLOAT
    return (*_HALF_DESCRIPTORS, *_HALF) if compute_capability >= 90 else _HALF
