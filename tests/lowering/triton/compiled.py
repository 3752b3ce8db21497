"""Kernels compiled for GPUs that need not be there, as Triton would for the same arguments, and what they take."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from fxpar.lowering.triton.launch import Arrival, Call, Destinations, Sum, gathered_call, scattered_call
from fxpar.lowering.triton.pieces import Pieces, Segments
from fxpar.lowering.triton.tiling import Tiling

_TICKETS = torch.empty(1, dtype=torch.int32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for one target. stack_bytes: of each thread; there is none unless registers were spilled."""

    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_call(call: Call, capability: int) -> Compiled:
    """The kernel of a call, compiled for sm_<capability>; the arguments' memory is neither read nor written."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = call.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    keywords = {**call.constants, "debug": False}
    bound, specialization, given_options = bind(*call.arguments, **keywords)
    options, signature, constants, attributes = kernel._pack_args(
        backend, keywords, bound, specialization, given_options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=target, options=options.__dict__)
    registers, stack_bytes = _resources(binary.asm["cubin"])
    return Compiled(binary.asm["ptx"], registers, stack_bytes, binary.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions = re.findall(r"REG:(\d+) STACK:(\d+)", found)
    return max(int(registers) for registers, _ in functions), max(int(stack) for _, stack in functions)


def gathered(dtype: torch.dtype, tiling: Tiling, rows: int = 8192, columns: int = 6144, terms: int = 12288) -> Call:
    """A gathered product with a bias of so many rows over 8 ranks."""
    left, right, bias, out = _product(dtype, rows, columns, terms)
    segments = Segments(Pieces(1, 8, rows // 8), 512)
    arrival = Arrival(torch.empty(segments.count, dtype=torch.int32), 1, segments, 3, _TICKETS)
    return gathered_call(left, right, bias, out, arrival, tiling)


def scattered(
    dtype: torch.dtype,
    tiling: Tiling,
    rows: int = 8192,
    columns: int = 12288,
    terms: int = 6144,
    *,
    by_columns: bool = False,
    has_bias: bool = True,
) -> Call:
    """A scattered product of so many rows over 8 ranks, and its sum. by_columns: pieces are transposed."""
    left, right, bias, _ = _product(dtype, rows, columns, terms)
    addresses = torch.empty(8, dtype=torch.int64)
    pieces = Pieces(1, 8, -(-rows // 8))
    strides = (1, pieces.rows) if by_columns else (columns, 1)
    room = torch.empty(9, -(-pieces.rows * columns // 64) * 64, dtype=dtype)
    to = Destinations(left, addresses, addresses, pieces, 3, strides, _TICKETS)
    return scattered_call(left, right, bias if has_bias else None, to, tiling, Sum(room[:8], room[8]))


def _product(dtype: torch.dtype, rows: int, columns: int, terms: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    left, right = torch.empty(1, rows, terms, dtype=dtype), torch.empty(1, columns, terms, dtype=dtype).mT
    bias = torch.empty(columns, dtype=dtype).expand(1, rows, columns)
    return left, right, bias, torch.empty(1, rows, columns, dtype=dtype)
