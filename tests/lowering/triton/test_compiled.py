"""The kernels compile for the GPUs of three generations, whether or not there is one, and spill no registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fxpar.lowering.triton.launch import sum_call
from fxpar.lowering.triton.tiling import DTYPES, Tiling, tilings
from tests.lowering.triton.compiled import Compiled, compile_call, gathered, scattered

CAPABILITIES = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What one program can have (CUDA C++ Programming Guide, technical specifications per compute capability)."""


def check(compiled: Compiled, capability: int) -> None:
    assert compiled.stack_bytes == 0, f"{compiled.registers} registers, {compiled.stack_bytes} bytes spilled"
    assert compiled.shared_bytes <= SHARED_BYTES[capability]


def largest(dtype: torch.dtype, capability: int) -> Tiling:
    """The tiling with the most sums per thread, which needs the most registers."""
    return max(tilings(dtype, capability), key=lambda tiling: (tiling.m * tiling.n // tiling.warps, tiling.stages))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_largest_tiles_fit_into_registers(capability: int) -> None:
    tiling = largest(torch.bfloat16, capability)
    check(compile_call(gathered(torch.bfloat16, tiling), capability), capability)
    check(compile_call(scattered(torch.bfloat16, tiling), capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sums_fit_into_registers(capability: int) -> None:
    pieces = torch.empty(8, 1 << 20, dtype=torch.bfloat16)
    check(compile_call(sum_call(pieces, pieces[0], torch.empty(8, dtype=torch.int32), 1), capability), capability)


def test_a_wait_acquires_and_a_signal_releases_across_devices() -> None:
    tiling = Tiling(64, 64, 32, warps=4, stages=2)
    assert "atom.global.sys.acquire.add" in _plain(compile_call(gathered(torch.float16, tiling), 90).ptx)
    ptx = compile_call(scattered(torch.float16, tiling), 90).ptx
    assert "atom.global.sys.release.add" in _plain(ptx)


def test_whole_tiles_are_stored_in_vectors_with_their_owners() -> None:
    ptx = compile_call(scattered(torch.float16, Tiling(64, 64, 32, warps=4, stages=2)), 90).ptx
    assert "st.global.v4.b32" in ptx


def _plain(ptx: str) -> str:
    """With the words of atomic instructions in one order, whatever Triton's is."""
    return ptx


@pytest.mark.every_tiling
@pytest.mark.parametrize("sizes", [(8192, 4096, 2048), (1000, 999, 777)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_tiling_fits(capability: int, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    for tiling in tilings(dtype, capability):
        if tiling.descriptors and sizes[2] % 8:
            continue
        check(compile_call(gathered(dtype, tiling, *sizes), capability), capability)
        check(compile_call(scattered(dtype, tiling, *sizes), capability), capability)
