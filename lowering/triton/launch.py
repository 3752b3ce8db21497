"""The arguments of the kernels. They run on the current stream, or on any memory in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fxpar.ir.tiles import LogicalBox
from fxpar.lowering.triton.factors import is_transposed, is_whole
from fxpar.lowering.triton.gather_kernel import multiply_gathered
from fxpar.lowering.triton.pieces import (
    Pieces,
    Segments,
    band_of_a_piece,
    order_of_arrival,
    order_of_owners,
    row_tiles,
    signals_of_owner,
)
from fxpar.lowering.triton.scatter_kernel import multiply_scattered
from fxpar.lowering.triton.tiling import Tiling
from fxpar.lowering.triton.uniform_kernel import draw_uniform

PLACE_ELEMENTS = 16
_VECTOR_BYTES = 16  # the most that one instruction loads
_UNIFORM_BLOCK = 1024
# Of a thread. Without a limit, ptxas spills registers to make room for programs that no tiling asks for. Of the limits
# that were tried, these let no kernel spill (`tests/lowering/triton/test_compiled.py`).
_GATHER_REGISTERS, _SCATTER_REGISTERS = 255, 232


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of rows at `rank`: `signals` (segments.count,), int32, become `epoch`, those of own rows first.

    tickets: int32 (1,), 0 before and after each kernel; of the stream that runs the kernels.
    """

    signals: Tensor
    epoch: int
    segments: Segments
    rank: int
    tickets: Tensor


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where `rank` stores the rows of each owner, and the owners' counters.

    origin, places: the piece of each owner begins `places` times `PLACE_ELEMENTS` elements after (or before) `origin`,
    which has the dtype of the product. places and counters, which are addresses, are int64 (parts,) on its device.
    strides: of a piece, between its rows and between its columns, in elements.
    tickets: see `Arrival`.
    one_counter: whether an owner has one counter for all of its piece, and not one for each tile.
    """

    origin: Tensor
    places: Tensor
    counters: Tensor
    pieces: Pieces
    rank: int
    strides: tuple[int, int]
    tickets: Tensor
    one_counter: bool = False


@dataclass(frozen=True, slots=True)
class Sum:
    """out = the sum of the `pieces` of all ranks, (parts, at least out.numel()), as they arrive.

    out, of the shape of a piece, and each piece have the strides of `Destinations`.
    """

    pieces: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel with all its arguments."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    """By name; num_warps and num_stages are among them."""

    def run(self, programs: int) -> None:
        """Launch that many programs on the device of the arguments."""
        self.kernel[(programs,)](*self.arguments, **self.constants)


def gathered_call(
    gathered: Tensor, right: Tensor, bias: Tensor | None, out: Tensor, arrival: Arrival, tiling: Tiling
) -> Call:
    """out = gathered @ right + bias, while rows of `gathered` arrive; all are (matrices, rows, columns).

    gathered: contiguous. bias: expanded to the shape of `out`. Any number of programs may share the tiles.
    """
    matrices, rows, terms = gathered.shape
    columns = out.shape[-1]
    segments = arrival.segments
    left_argument, right_argument = _factors(gathered, right, tiling)
    arguments = (
        left_argument,
        right_argument,
        bias,
        out,
        arrival.signals,
        _arrival_table(matrices, rows, tiling.m, segments, arrival.rank, out.device),
        arrival.tickets,
        wrapped(arrival.epoch),
        matrices,
        rows,
        columns,
        terms,
        segments.pieces.rows,
        segments.rows,
        segments.per_block,
        *right.stride(),
        *_bias_strides(bias),
        *out.stride(),
    )
    constants = _constants(gathered.dtype, rows, columns, terms, bias, tiling)
    constants["BAND"] = band_of_a_piece(tiling.band, matrices * -(-rows // tiling.m), segments.pieces.parts)
    constants["maxnreg"] = _GATHER_REGISTERS
    constants["TRANSPOSED"] = is_transposed(right)
    constants["FENCED"] = tiling.descriptors and not triton.knobs.runtime.interpret
    return Call(multiply_gathered, arguments, constants)


def scattered_call(
    left: Tensor, right: Tensor, bias: Tensor | None, to: Destinations, tiling: Tiling, total: Sum | None = None
) -> Call:
    """left @ right + bias, each row stored in the memory of its owner; all are (matrices, rows, columns). Then `total`.

    bias: expanded to the shape of the product. Any number of programs may share the tiles.
    """
    matrices, rows, terms = left.shape
    columns, pieces = right.shape[-1], to.pieces
    left_argument, right_argument = _factors(left, right, tiling)
    places = matrices, rows, tiling.m, pieces, to.rank, left.device
    arguments = (
        left_argument,
        right_argument,
        bias,
        to.origin,
        to.places,
        to.counters,
        _owners_table(*places),
        to.tickets,
        *_sum_arguments(to, total, _arrivals_table(*places)),
        matrices,
        rows,
        columns,
        terms,
        pieces.rows,
        pieces.parts,
        to.rank,
        *left.stride(),
        *right.stride(),
        *_bias_strides(bias),
        *to.strides,
        *((0, 0) if to.one_counter else (-(-columns // tiling.n), 1)),
    )
    constants = _constants(left.dtype, rows, columns, terms, bias, tiling)
    constants["BAND"] = band_of_a_piece(tiling.band, matrices * -(-rows // tiling.m), pieces.parts)
    constants["maxnreg"] = _SCATTER_REGISTERS
    constants["LEFT_TRANSPOSED"] = is_transposed(left)
    constants["RIGHT_TRANSPOSED"] = is_transposed(right)
    constants["SUM_M"], constants["SUM_N"] = _summed_at_a_time(tiling, left.dtype, by_columns=to.strides[1] != 1)
    return Call(multiply_scattered, arguments, constants)


def counters_of(pieces: Pieces, columns: int, tiling: Tiling) -> int:
    """How many counters an owner has for the tiles of its piece."""
    return -(-pieces.outer * pieces.rows // tiling.m) * -(-columns // tiling.n)


def _sum_arguments(to: Destinations, total: Sum | None, arrivals: Tensor) -> tuple[Any, ...]:
    if total is None:
        return to.origin, to.origin, arrivals, 0, 0
    return total.pieces, total.out, arrivals, to.pieces.outer * to.pieces.rows, total.pieces.stride(0)


def _summed_at_a_time(tiling: Tiling, dtype: torch.dtype, *, by_columns: bool) -> tuple[int, int]:
    """The rows and columns of a tile that its program sums up at a time; what is contiguous in memory is not cut."""
    elements = 32 * tiling.warps * _VECTOR_BYTES // dtype.itemsize
    if by_columns:
        return tiling.m, min(tiling.n, max(1, elements // tiling.m))
    return min(tiling.m, max(1, elements // tiling.n)), tiling.n


def places_of(addresses: Iterable[int], origin: Tensor) -> tuple[int, ...]:
    """Addresses as the `places` of `Destinations`."""
    unit = PLACE_ELEMENTS * origin.element_size()
    distances = [address - origin.data_ptr() for address in addresses]
    assert all(distance % unit == 0 for distance in distances), "pieces are aligned for vectors"
    return tuple(distance // unit for distance in distances)


def uniform_call(out: Tensor, stream: Tensor, box: LogicalBox, span: int) -> Call:
    """out = what `fxpar::uniform` draws from `stream` for `box`; out is contiguous and has as many elements as the box.

    It takes `uniform_programs(out)` programs.
    """
    joined = box.joined()
    dims = _dims_table(joined.sizes, joined.strides, out.device)
    arguments = out, stream, dims, box.offset, span, out.numel()
    drawn = 4 if _is_made_of_blocks(joined, span) else 1
    return Call(draw_uniform, arguments, {"NDIM": len(dims), "BLOCK": _UNIFORM_BLOCK, "DRAWN": drawn})


def _is_made_of_blocks(box: LogicalBox, span: int) -> bool:
    """Whether each four elements in a row have the logical indices of one block of Philox: 4 n to 4 n + 3."""
    starts = box.offset, span, *box.strides[:-1]
    return box.strides[-1] == 1 and box.sizes[-1] % 4 == 0 and all(start % 4 == 0 for start in starts)


def uniform_programs(out: Tensor) -> int:
    """The number of programs for `uniform_call`."""
    return -(-out.numel() // _UNIFORM_BLOCK)


def wrapped(count: int) -> int:
    """A count as kernels compare it: as an int32, modulo 2^32."""
    return (count + (1 << 31)) % (1 << 32) - (1 << 31)


def _factors(left: Tensor, right: Tensor, tiling: Tiling) -> tuple[Any, Any]:
    if not tiling.descriptors:
        return left, right
    return _descriptor(left[0], tiling.m, tiling.k), _descriptor(right[0], tiling.k, tiling.n)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    if is_transposed(matrix):
        return TensorDescriptor.from_tensor(matrix.mT, [columns, rows])
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if bias is None else bias.stride()


def _constants(
    dtype: torch.dtype, rows: int, columns: int, terms: int, bias: Tensor | None, tiling: Tiling
) -> dict[str, Any]:
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return {
        "BLOCK_M": tiling.m,
        "BLOCK_N": tiling.n,
        "BLOCK_K": tiling.k,
        "WHOLE": is_whole(rows, columns, terms, tiling),
        "SAME_ROWS": bias is not None and bias.stride(1) == 0,
        "SAME_COLUMNS": bias is not None and bias.stride(2) == 0,
        "PRECISION": "ieee" if exact else "tf32",
        "WIDEN": triton.knobs.runtime.interpret,
        "DESCRIPTORS": tiling.descriptors,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


@lru_cache(maxsize=1024)
def _arrival_table(
    matrices: int, rows: int, tile_rows: int, segments: Segments, rank: int, device: torch.device
) -> Tensor:
    return _table(order_of_arrival(list(row_tiles(matrices, rows, tile_rows)), segments, rank), device)


@lru_cache(maxsize=1024)
def _owners_table(matrices: int, rows: int, tile_rows: int, pieces: Pieces, rank: int, device: torch.device) -> Tensor:
    return _table(order_of_owners(list(row_tiles(matrices, rows, tile_rows)), pieces, rank), device)


@lru_cache(maxsize=1024)
def _arrivals_table(
    matrices: int, rows: int, tile_rows: int, pieces: Pieces, owner: int, device: torch.device
) -> Tensor:
    return _table(signals_of_owner(list(row_tiles(matrices, rows, tile_rows)), pieces, owner, tile_rows), device)


@lru_cache(maxsize=1024)
def _dims_table(sizes: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([sizes[::-1], strides[::-1]], dtype=torch.int64).T.contiguous().to(device)


def _table(order: list[int], device: torch.device) -> Tensor:
    return torch.tensor(order, dtype=torch.int32, device=device)
