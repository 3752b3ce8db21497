"""The matmul that stores each tile in the memory of the rank that owns its rows, and the sum of the pieces there."""

from __future__ import annotations

import triton
import triton.language as tl

from fxpar.lowering.triton.tile import (
    STORED_COLUMNS,
    halves,
    place_of_tile,
    plus_bias,
    product_by_descriptors,
    product_by_pointers,
    wait_until,
)


@triton.jit
def store_with_owners(
    total: tl.tensor,
    origin: tl.tensor,
    places: tl.tensor,
    bias_at: tl.tensor,
    start: tl.tensor,
    column: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    block_rows: tl.tensor,
    parts: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    stride_bm: tl.tensor,
    stride_bn: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    SAME_COLUMNS: tl.constexpr,
) -> None:
    """Store a tile, plus its bias if there is one; its first element is at (start, column). See `multiply_scattered`.

    height, width: the rows and columns of the tile that exist. WHOLE: all of them do.
    """
    if BLOCK_N > STORED_COLUMNS:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(total, BLOCK_M, BLOCK_N)
        right_bias = bias_at if bias_at is None else bias_at + HALF * stride_bn
        store_with_owners(
            left,
            origin,
            places,
            bias_at,
            start,
            column,
            height,
            width,
            block_rows,
            parts,
            stride_m,
            stride_n,
            stride_bm,
            stride_bn,
            BLOCK_M,
            HALF,
            WHOLE,
            SAME_ROWS,
            SAME_COLUMNS,
        )
        store_with_owners(
            right,
            origin,
            places,
            right_bias,
            start,
            column + HALF,
            height,
            width - HALF,
            block_rows,
            parts,
            stride_m,
            stride_n,
            stride_bm,
            stride_bn,
            BLOCK_M,
            HALF,
            WHOLE,
            SAME_ROWS,
            SAME_COLUMNS,
        )
    else:
        if bias_at is not None:
            total = plus_bias(
                total, bias_at, height, width, stride_bm, stride_bn, BLOCK_M, BLOCK_N, SAME_ROWS, SAME_COLUMNS
            )
        m = tl.arange(0, BLOCK_M)[:, None]
        n = tl.arange(0, BLOCK_N)[None, :]
        rounded = total.to(origin.dtype.element_ty)
        for block in range(start // block_rows, (start + height - 1) // block_rows + 1):
            row = (
                start + (block // parts - block) * block_rows
            )  # of the piece: the tile's first row if it is in the block
            place = tl.load(places + block % parts) * 16  # as a product, so that the compiler knows the alignment
            at = origin + place + row * stride_m + column.to(tl.int64) * stride_n
            first = (block * block_rows - start).to(tl.int32)
            stop = tl.minimum((block + 1) * block_rows - start, height).to(tl.int32)
            if WHOLE:
                tl.store(at + m * stride_m + n * stride_n, rounded, mask=(m >= first) & (m < stop))
            else:
                tl.store(at + m * stride_m + n * stride_n, rounded, mask=(m >= first) & (m < stop) & (n < width))


@triton.jit
def multiply_scattered(
    left: tl.tensor,
    right: tl.tensor,
    bias: tl.tensor,
    origin: tl.tensor,
    places: tl.tensor,
    signals: tl.tensor,
    order: tl.tensor,
    matrices: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    block_rows: tl.tensor,
    parts: tl.tensor,
    stride_lb: tl.tensor,
    stride_lm: tl.tensor,
    stride_lk: tl.tensor,
    stride_rb: tl.tensor,
    stride_rk: tl.tensor,
    stride_rn: tl.tensor,
    stride_bb: tl.tensor,
    stride_bm: tl.tensor,
    stride_bn: tl.tensor,
    stride_pm: tl.tensor,
    stride_pn: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    WHOLE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    SAME_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    LEFT_TRANSPOSED: tl.constexpr,
    RIGHT_TRANSPOSED: tl.constexpr,
) -> None:
    """left[b] @ right[b] + bias[b], (M, N) each, for every matrix b; each row is stored in the memory of its owner.

    Rows, numbered through all matrices, have the digits (outer, parts, block_rows), the second of which is their owner.
    places: for each owner, the offset of its piece from `origin` (any memory), in units of 16 elements.
    The rows (outer, block_rows) of a piece are `stride_pm` apart, its columns `stride_pn`.
    signals: for each owner, the address of a counter, to which 1 is added for every tile and every block of its rows
    in the tile, when they are stored.

    A persistent kernel: with P programs, each computes every P-th tile, row tiles in the given `order`.

    DESCRIPTORS: `left` and `right` are tensor descriptors of one matrix each (K x M and N x K where TRANSPOSED).
    """
    tiles_of_matrix = tl.cdiv(M, BLOCK_M)
    row_tiles = matrices * tiles_of_matrix
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        position, column_tile = place_of_tile(tile, row_tiles, column_tiles, BAND)
        row_tile = tl.load(order + position)
        matrix = (row_tile // tiles_of_matrix).to(tl.int64)
        row = row_tile % tiles_of_matrix * BLOCK_M
        column = column_tile * BLOCK_N
        height = min(M - row, BLOCK_M)
        width = min(N - column, BLOCK_N)
        if DESCRIPTORS:
            total = product_by_descriptors(
                left,
                right,
                row,
                column,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                LEFT_TRANSPOSED,
                RIGHT_TRANSPOSED,
                PRECISION,
                WIDEN,
            )
        else:
            total = product_by_pointers(
                left + matrix * stride_lb + row.to(tl.int64) * stride_lm,
                right + matrix * stride_rb + column.to(tl.int64) * stride_rn,
                height,
                width,
                K,
                stride_lm,
                stride_lk,
                stride_rk,
                stride_rn,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                WHOLE,
                PRECISION,
                WIDEN,
            )
        bias_at = bias
        if bias is not None:
            bias_at = bias + matrix * stride_bb + row.to(tl.int64) * stride_bm + column.to(tl.int64) * stride_bn
        start = matrix * M + row
        store_with_owners(
            total,
            origin,
            places,
            bias_at,
            start,
            column,
            height,
            width,
            block_rows,
            parts,
            stride_pm,
            stride_pn,
            stride_bm,
            stride_bn,
            BLOCK_M,
            BLOCK_N,
            WHOLE,
            SAME_ROWS,
            SAME_COLUMNS,
        )
        tl.debug_barrier()  # all stores of the program come before the signals, which one thread sets
        for block in range(start // block_rows, (start + height - 1) // block_rows + 1):
            counter = tl.load(signals + block % parts).to(tl.pointer_type(tl.int32))
            tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["target"])
def sum_pieces(
    pieces: tl.tensor,
    out: tl.tensor,
    signals: tl.tensor,
    target: tl.tensor,
    size: tl.tensor,
    piece_size: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the sum of `parts` pieces, added up in float32 in the order of ranks, to `out`, of `size` elements.

    Pieces are `piece_size` elements apart. That of a rank has arrived when the rank's counter in `signals` is `target`.
    """
    arrived = 0
    for source in range(0, parts):
        arrived += wait_until(signals + source, target)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    piece = pieces + arrived
    for _ in range(0, parts):
        total += tl.load(piece + place, mask=inside, other=0.0).to(tl.float32)
        piece += piece_size
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
