"""Measure how fast this rank multiplies matrices and copies memory, while the other ranks do the same."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LARGEST = {"cpu": 4096, "cuda": 16384}
_LONGEST_S = 0.1
"""Matrices grow until one product takes this long."""

_COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Larger than any cache."""

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """The rate of products of square matrices with `size` rows."""

    dtype: str
    size: int
    flops_per_us: float


def matmul_rates(device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[MatmulRate]:
    """The rates of products of growing size in each of `dtypes`."""
    for dtype in dtypes:
        size, seconds = 128, 0.0
        while size <= _LARGEST[device.type] and seconds < _LONGEST_S:
            # Not constants: a GPU multiplies them faster than a model's numbers, since fewer bits change.
            left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
            product = torch.empty_like(left)
            seconds = _median_s(partial(torch.mm, left, right, out=product), device)
            yield MatmulRate(str(dtype).removeprefix("torch."), size, 2e-6 * size**3 / seconds)
            size *= 2


def memory_bytes_per_us(device: torch.device) -> float:
    """The rate of a copy: bytes read and written together."""
    num_bytes = _COPIED_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2e-6 * num_bytes / _median_s(lambda: target.copy_(source), device)


def memory_bytes(device: torch.device, ranks_on_host: int) -> float:
    """The memory of a rank: its GPU's, or an equal part of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_on_host


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    """The median time of `work`, without the first run, which may load or choose code."""
    seconds = []
    for _ in range(1 + _REPEATS):
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def wait_for(device: torch.device) -> None:
    """Wait until `device` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
