"""Random numbers by logical index, from a counter-based generator: csrc/philox.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from fxpar.core.library import function


def philox_block(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Encrypt four 32-bit counter words under two 32-bit key words into four uniform 32-bit words.

    Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3.
    """
    words = (c_uint32 * 4)()
    _block()(words, (c_uint32 * 4)(*counter), (c_uint32 * 2)(*key))
    return tuple(words)


def philox_uniform(
    shape: Sequence[int], strides: Sequence[int], offset: int, *, seed: int, step: int, op: int
) -> torch.Tensor:
    """Draw the uniform numbers in [0, 1) of a box of a logical tensor, on the CPU.

    Element ``i`` of the float32 result, of shape `shape`, is the number of logical index
    ``offset + sum(i[d] * strides[d])``. Strides and offset count elements of the logical tensor, so a shard has exactly
    the numbers that the whole tensor has there. `seed` is taken modulo 2**64; `step` and `op` are below 2**32.
    """
    assert len(shape) == len(strides), f"{len(shape)} sizes but {len(strides)} strides"
    assert 0 <= step < 2**32 and 0 <= op < 2**32, f"step {step} and op {op} must fit in 32 bits"
    box = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    int64s = c_int64 * len(shape)
    status = _uniform()(box.data_ptr(), seed, step, op, len(shape), int64s(*shape), int64s(*strides), offset)
    assert status == 0, f"logical indices of shape {shape}, strides {strides}, offset {offset} leave [0, 2**63)"
    return box


@cache
def _block() -> Any:
    words = POINTER(c_uint32)
    return function("fxpar_philox_block", None, words, words, words)


@cache
def _uniform() -> Any:
    sizes = POINTER(c_int64)
    return function("fxpar_philox_uniform", c_int, c_void_p, c_uint64, c_uint32, c_uint32, c_int, sizes, sizes, c_int64)
