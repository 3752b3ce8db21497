"""Fused kernels on one GPU, which copies to and from pinned memory of its host: a single rank without peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from fxpar.bench.fused.cases import overlap_efficiency
from fxpar.bench.fused.rank_on_one_gpu import GatherOnOneGpu, ScatterOnOneGpu
from fxpar.bench.report import Row, Say
from fxpar.lowering.triton.decide import possible_tilings, time_us
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.tiling import Tiling
from fxpar.lowering.triton.tuner import gather_variants

PARTS = 8
MODE = "one GPU: the other ranks are pinned memory of the host, reached over PCIe"


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of m x k by k x n on one of `PARTS` ranks: the left factor is gathered, or the product scattered."""

    op: Literal["gather", "scatter"]
    m: int
    n: int
    k: int

    @property
    def in_vectors(self) -> bool:
        """See `fxpar.lowering.triton.factors.come_in_vectors`; the right factor is transposed, as a layer's weight."""
        return self.n % 16 == 0 and self.k % 16 == 0


SHAPES = (
    *(Shape("gather", m, 49152 // PARTS, 12288) for m in (64, 512, 1024, 2048, 4096, 8192)),
    *(Shape("scatter", m, 12288, 49152 // PARTS) for m in (64, 512, 1024, 2048, 4096, 8192)),
)
"""The shapes of FLUX (Chang et al.): the two matmuls of a layer of GPT-3, over eight ranks."""


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of the library's matmul, of the kernel without waiting, of copies, and of both in turn and fused."""

    library: float
    kernel: float
    copies: float
    in_turn: float
    fused: float


def one_gpu_rows(shapes: Sequence[Shape], dtype: torch.dtype, say: Say) -> list[Row]:
    """A row for each shape, measured on the current CUDA device. It needs Triton.

    The effective communication time of a way is its time minus that of the best matmul, the library's or the kernel's.
    The efficiency is the share of that of the sequential way that the fused way hides, at most `ceiling` (Chang et al.,
    FLUX).
    """
    rows = []
    for shape in shapes:
        say(f"{shape.op}, m={shape.m}, n={shape.n}, k={shape.k}, {MODE}")
        times = (_time_gather if shape.op == "gather" else _time_scatter)(shape, dtype)
        rows.append(one_gpu_row(shape, dtype, times))
    return rows


def one_gpu_row(shape: Shape, dtype: torch.dtype, times: Times) -> Row:
    """The row of a shape, computed from its times."""
    matmul = min(times.library, times.kernel)
    return {
        "mode": MODE,
        "op": shape.op,
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "dtype": str(dtype).removeprefix("torch."),
        "library_us": times.library,
        "kernel_us": times.kernel,
        "kernel_over_library": times.kernel / times.library,
        "copies_us": times.copies,
        "in_turn_us": times.in_turn,
        "fused_us": times.fused,
        "effective_communication_in_turn_us": times.in_turn - matmul,
        "effective_communication_fused_us": times.fused - matmul,
        "efficiency": overlap_efficiency(times.fused / matmul, times.in_turn / matmul),
        "ceiling": min(1.0, matmul / times.copies),
    }


def _time_gather(shape: Shape, dtype: torch.dtype) -> Times:
    case = GatherOnOneGpu.random(shape.m, shape.n, shape.k, PARTS, dtype)
    block = shape.m // PARTS
    whole = case.segments(block)

    def copies() -> None:
        case.copy(whole)
        case.await_copies()

    copies()
    library = time_us(case.library)
    kernel, tiling = _best(shape, dtype, lambda tiling: lambda: case.multiply(Fused(tiling, block)))

    def in_turn() -> None:
        copies()
        case.library() if library < kernel else case.multiply(Fused(tiling, block))

    ways = [way for way in gather_variants(tiling, block) if not way.pushes]
    fused = min(time_us(partial(case.fused, way)) for way in ways)
    return Times(library, kernel, time_us(copies), time_us(in_turn), fused)


def _time_scatter(shape: Shape, dtype: torch.dtype) -> Times:
    case = ScatterOnOneGpu.random(shape.m, shape.n, shape.k, PARTS, dtype)
    library = time_us(case.library)

    def multiply(tiling: Tiling) -> Callable[[], None]:
        call = case.call(Fused(tiling))
        return lambda: case.multiply(call, Fused(tiling))

    kernel, tiling = _best(shape, dtype, multiply)
    how, call, best_kernel = Fused(tiling), case.call(Fused(tiling)), multiply(tiling)

    def in_turn() -> None:
        case.library() if library < kernel else best_kernel()
        case.copies_alone()

    fused = time_us(lambda: case.fused(call, how))
    return Times(library, kernel, time_us(case.copies_alone), time_us(in_turn), fused)


def _best(shape: Shape, dtype: torch.dtype, run: Callable[[Tiling], Callable[[], None]]) -> tuple[float, Tiling]:
    """The time of the fastest tiling, and that tiling."""
    device = torch.device("cuda", torch.cuda.current_device())
    possible = possible_tilings(shape.op, dtype, device, vectors=shape.in_vectors, matrices=1)
    times = [time_us(run(tiling)) for tiling in possible]
    best = min(range(len(times)), key=lambda place: times[place])
    return times[best], possible[best]
