"""The kernels compile for the GPUs of three generations, whether or not there is one, and spill no registers."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from fxpar.ir.tiles import LogicalBox
from fxpar.lowering.triton.launch import uniform_call
from fxpar.lowering.triton.tiling import DTYPES, Op, Tiling, tilings
from tests.lowering.triton.compiled import Compiled, compile_call, gathered, scattered

CAPABILITIES = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What one program can have (CUDA C++ Programming Guide, technical specifications per compute capability)."""


WHOLE, CUT, ODD = (8192, 4096, 2048), (1000, 1008, 784), (1000, 999, 777)
"""Rows, columns and terms: of whole tiles, of tiles that are cut short, and of what does not come in vectors."""


def check(compiled: Compiled, capability: int) -> None:
    assert compiled.stack_bytes == 0, f"{compiled.registers} registers, {compiled.stack_bytes} bytes spilled"
    assert compiled.shared_bytes <= SHARED_BYTES[capability]


def check_tilings(op: Op, dtype: torch.dtype, capability: int, sizes: tuple[int, int, int], most: int = 100) -> None:
    """Compile the first `most` tilings; the largest come first."""
    call = gathered if op == "gather" else scattered
    vectors = sizes[1] % 16 == 0 and sizes[2] % 16 == 0
    for tiling in tilings(op, dtype, capability, vectors=vectors, matrices=1)[:most]:
        check(compile_call(call(dtype, tiling, *sizes), capability), capability)


@pytest.mark.parametrize("op", ["gather", "scatter"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_largest_tiles_fit_into_registers(capability: int, op: Op) -> None:
    check_tilings(op, torch.bfloat16, capability, WHOLE, most=1)
    check_tilings(op, torch.bfloat16, capability, CUT, most=1)


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_tiles_by_pointers_of_all_dtypes_fit_into_registers(op: Op) -> None:
    for dtype in DTYPES:
        check_tilings(op, dtype, 80, CUT, most=1)
        check_tilings(op, dtype, 90, ODD, most=1)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("sizes", "by_columns"), [(WHOLE, False), (WHOLE, True), (CUT, False)])
def test_pieces_are_loaded_and_sums_stored_in_vectors(
    sizes: tuple[int, int, int], by_columns: bool, capability: int
) -> None:
    tiling = tilings("scatter", torch.bfloat16, capability, vectors=True, matrices=1)[0]
    call = scattered(torch.bfloat16, tiling, *sizes, by_columns=by_columns, has_bias=False)
    compiled = compile_call(call, capability)
    check(compiled, capability)
    of_a_loop, of_its_remainder = 8, 1  # so that loads from eight pieces are under way at a time
    assert compiled.ptx.count("ld.global.v4.b32") == of_a_loop + of_its_remainder, "factors are loaded otherwise"
    assert not re.search(r"(ld|st)\.global\.b16", compiled.ptx)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_random_numbers_fit_into_registers(capability: int) -> None:
    out, stream = torch.empty(1 << 20), torch.empty(1, 4, dtype=torch.int64)
    for sizes, strides in (((1 << 20,), (1,)), ((64, 128, 128), (1 << 30, 1 << 12, 1))):
        box = LogicalBox(sizes, strides, 1 << 40)
        check(compile_call(uniform_call(out, stream, box, 1 << 50), capability), capability)


def test_a_wait_acquires_and_a_signal_releases_across_devices() -> None:
    tiling = Tiling(64, 64, 32, warps=4, stages=2)
    waits = compile_call(gathered(torch.float16, tiling), 90).ptx
    assert re.search(r"(ld|atom)\.global\.sys\.acquire", waits), "to add 0 atomically is to load"
    assert re.search(r"(atom|red)\.global\.sys\.release\.add", compile_call(scattered(torch.float16, tiling), 90).ptx)


def test_whole_tiles_are_stored_in_vectors_with_their_owners() -> None:
    ptx = compile_call(scattered(torch.float16, Tiling(64, 64, 32, warps=4, stages=2)), 90).ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.every_tiling
@pytest.mark.parametrize("sizes", [WHOLE, CUT, ODD])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_tiling_fits_into_registers(capability: int, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    check_tilings("gather", dtype, capability, sizes)
    check_tilings("scatter", dtype, capability, sizes)
