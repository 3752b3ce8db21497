"""`matmul_reduce_scatter` and `matmul_all_reduce` on GPUs of one host that can write to each other's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.lowering.triton.copies import Shared, on_copy_stream, pull
from fxpar.lowering.triton.factors import as_matrices, dense
from fxpar.lowering.triton.launch import Destinations, Sum, counters_of, places_of, scattered_call
from fxpar.lowering.triton.pieces import Pieces
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.workspace import Half, Workspace

_ALIGNMENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class Product:
    """left @ right + bias, (matrices, rows, columns) each, and the pieces of its rows.

    piece_shape: the shape of a piece. strides: between its rows and between its columns.
    """

    left: Tensor
    right: Tensor
    bias: Tensor | None
    pieces: Pieces
    piece_shape: tuple[int, ...]
    strides: tuple[int, int]

    @classmethod
    def of(cls, left: Tensor, right: Tensor, bias: Tensor | None, form: str, outer: int, parts: int) -> Product:
        """See `fxpar.ir.fused_ops.matmul_reduce_scatter`; the form "columns" only without a batch."""
        shape = [*left.shape[:-1], right.shape[-1]]
        rows, columns = shape[-2:]
        matrices = shape[0] if len(shape) == 3 else 1
        terms = None if bias is None else as_matrices(bias.expand(shape))
        factors = dense(as_matrices(left)), dense(as_matrices(right))
        if form == "columns":
            assert matrices == 1, "columns of one matrix are its transpose's rows"
            shape[-1] //= parts
            pieces, strides = Pieces(outer, parts, columns // (outer * parts)), (1, columns // parts)
            transposed = factors[1].mT, factors[0].mT, None if terms is None else terms.mT
            return cls(*transposed, pieces, tuple(shape), strides)
        if form == "matrices":
            shape[0] //= parts
            pieces = Pieces(outer, parts, matrices // (outer * parts) * rows)
        else:
            shape[-2] //= parts
            pieces = Pieces(matrices * outer, parts, rows // (outer * parts))
        return cls(*factors, terms, pieces, tuple(shape), (columns, 1))

    @classmethod
    def of_all(cls, left: Tensor, right: Tensor, bias: Tensor | None, parts: int) -> Product:
        """For `matmul_all_reduce`: the last pieces are smaller, or empty, if `parts` does not divide the rows."""
        shape = [*left.shape[:-1], right.shape[-1]]
        rows = -(-torch.Size(shape[:-1]).numel() // parts)
        terms = None if bias is None else as_matrices(bias.expand(shape))
        factors = dense(as_matrices(left)), dense(as_matrices(right))
        return cls(*factors, terms, Pieces(1, parts, rows), (rows, shape[-1]), (shape[-1], 1))


def multiply_and_scatter(product: Product, how: Fused, workspace: Workspace) -> Tensor:
    """This rank's piece of the sum over ranks."""
    out = product.left.new_empty(product.piece_shape)
    _multiply(product, how, _begin(product, how, workspace, 0), workspace, out)
    return out


def multiply_and_reduce(product: Product, how: Fused, workspace: Workspace) -> Tensor:
    """The whole sum over ranks, (rows of all matrices, columns): every rank sums a piece, and copies the others."""
    columns, dtype = product.right.shape[-1], product.left.dtype
    out = product.left.new_empty(product.left.shape[0] * product.left.shape[1], columns)
    slots_bytes = workspace.parts * _piece_bytes(product)
    half = _begin(product, how, workspace, _piece_bytes(product))

    def shared(rank: int) -> Tensor:
        return half.data(rank, dtype, *product.piece_shape, start_bytes=slots_bytes)

    def take(rank: int, piece: Tensor) -> None:
        rows = out[rank * product.pieces.rows : (rank + 1) * product.pieces.rows]
        rows.copy_(piece[: len(rows)])

    like = product.left
    prepared = workspace.prepared(half, Shared, like, product.piece_shape, lambda: Shared.of(workspace, half, shared))
    _multiply(product, how, half, workspace, prepared.own)
    take(workspace.rank, prepared.own)
    on_copy_stream(workspace, lambda: pull(prepared, half.epoch, take))
    torch.cuda.current_stream().wait_stream(workspace.copies)
    return out


def _begin(product: Product, how: Fused, workspace: Workspace, more_bytes: int) -> Half:
    """The half of the call, which has `more_bytes` after the pieces of all ranks."""
    counters = counters_of(product.pieces, product.right.shape[-1], how.tiling)
    return workspace.begin(workspace.parts * _piece_bytes(product) + more_bytes, counters=counters)


def _multiply(product: Product, how: Fused, half: Half, workspace: Workspace, out: Tensor) -> None:
    """Launch the kernel that stores each piece of this rank's product on its owner, and sums its own piece to `out`."""
    layout = product.pieces, product.strides, _piece_bytes(product)
    at = workspace.prepared(half, _Places, product.left, layout, lambda: _Places.of(product, half, workspace))
    call = scattered_call(product.left, product.right, product.bias, at.to, how.tiling, Sum(at.arrived, out))
    call.run(how.programs(workspace.device))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where this rank stores pieces of a product in half of a workspace, and where those of all ranks arrive for it."""

    to: Destinations
    arrived: Tensor

    @classmethod
    def of(cls, product: Product, half: Half, workspace: Workspace) -> _Places:
        """For products of these shapes."""
        piece_bytes, own = _piece_bytes(product), workspace.rank
        dtype, device, ranks = product.left.dtype, workspace.device, range(workspace.parts)
        addresses = (half.data(rank, torch.uint8, 1, start_bytes=own * piece_bytes).data_ptr() for rank in ranks)
        origin = half.data(own, dtype, 1)
        places = torch.tensor(places_of(addresses, origin), dtype=torch.int64, device=device)
        counters = torch.tensor([half.counters(rank).data_ptr() for rank in ranks], dtype=torch.int64, device=device)
        to = Destinations(origin, places, counters, product.pieces, own, product.strides, workspace.tickets)
        return cls(to, half.data(own, dtype, workspace.parts, piece_bytes // dtype.itemsize))


def _piece_bytes(product: Product) -> int:
    num_bytes = torch.Size(product.piece_shape).numel() * product.left.element_size()
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
