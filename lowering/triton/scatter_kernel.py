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
    return_tickets,
    take_ticket,
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

    height, width: the rows and columns from here on that exist. WHOLE: the tile has no others.
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
        for block in range(start // block_rows, (start + min(height, BLOCK_M) - 1) // block_rows + 1):
            # Of the piece: the tile's first row if it is in the block.
            row = start + (block // parts - block) * block_rows
            place = tl.load(places + block % parts) * 16  # as a product, so that the compiler knows the alignment
            at = origin + place + row.to(tl.int64) * stride_m + column.to(tl.int64) * stride_n
            first = block * block_rows - start
            stop = tl.minimum((block + 1) * block_rows - start, height)
            if WHOLE:
                tl.store(at + m * stride_m + n * stride_n, rounded, mask=(m >= first) & (m < stop))
            else:
                tl.store(at + m * stride_m + n * stride_n, rounded, mask=(m >= first) & (m < stop) & (n < width))


@triton.jit
def signal_owners(
    signals: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    column_tile: tl.tensor,
    stride_sm: tl.tensor,
    stride_sn: tl.tensor,
    block_rows: tl.tensor,
    parts: tl.tensor,
    BLOCK_M: tl.constexpr,
) -> None:
    """Tell the owners of the rows from `start` to `stop` that they are stored; see `signals_of_owner`."""
    for block in range(start // block_rows, (stop - 1) // block_rows + 1):
        before = (block - block // parts) * block_rows  # the rows of other owners before this block
        first = tl.maximum(start, block * block_rows) - before
        last = tl.minimum(stop, (block + 1) * block_rows) - 1 - before
        counters = tl.load(signals + block % parts).to(tl.pointer_type(tl.int32)) + column_tile * stride_sn
        for tile in range(first // BLOCK_M, last // BLOCK_M + 1):
            tl.atomic_add(counters + tile * stride_sm, 1, sem="release", scope="sys")


@triton.jit
def sum_tile(
    pieces: tl.tensor,
    out: tl.tensor,
    counter: tl.tensor,
    target: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    piece_size: tl.tensor,
    parts: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUM_M: tl.constexpr,
    SUM_N: tl.constexpr,
) -> None:
    """Write the sum of a tile of all `parts` pieces, added up in float32 in the order of ranks, to the tile of `out`.

    Pieces of rows x columns, with the strides of `out`, are `piece_size` elements apart. The tile, whose first element
    is at (row, column), has arrived when `counter` is `target`; then it is reset. SUM_M x SUM_N elements are summed at
    a time.
    """
    arrived = wait_until(counter, target)
    tl.store(counter, arrived)
    pieces += arrived * 16  # as a product, so that the compiler knows the alignment
    for place in range(0, (BLOCK_M // SUM_M) * (BLOCK_N // SUM_N)):
        m = row + place // (BLOCK_N // SUM_N) * SUM_M + tl.arange(0, SUM_M)[:, None]
        n = column + place % (BLOCK_N // SUM_N) * SUM_N + tl.arange(0, SUM_N)[None, :]
        inside = (m < rows) & (n < columns)
        at = m.to(tl.int64) * stride_m + n.to(tl.int64) * stride_n
        total = tl.zeros((SUM_M, SUM_N), tl.float32)
        piece = pieces
        for _ in tl.range(0, parts, loop_unroll_factor=8):  # so that loads from several pieces are under way at a time
            total += tl.load(piece + at, mask=inside, other=0.0).to(tl.float32)
            piece += piece_size
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_scattered(
    left: tl.tensor,
    right: tl.tensor,
    bias: tl.tensor,
    origin: tl.tensor,
    places: tl.tensor,
    signals: tl.tensor,
    order: tl.tensor,
    tickets: tl.tensor,
    pieces: tl.tensor,
    out: tl.tensor,
    arrivals: tl.tensor,
    piece_rows: tl.tensor,
    piece_size: tl.tensor,
    matrices: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    block_rows: tl.tensor,
    parts: tl.tensor,
    rank: tl.tensor,
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
    stride_sm: tl.tensor,
    stride_sn: tl.tensor,
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
    SUM_M: tl.constexpr,
    SUM_N: tl.constexpr,
) -> None:
    """left[b] @ right[b] + bias[b], (M, N) each, for every matrix b; each row is stored in the memory of its owner.

    Rows, numbered through all matrices, have the digits (outer, parts, block_rows), the second of which is their owner.
    places: for each owner, the offset of its piece from `origin` (any memory), in units of 16 elements.
    The rows (outer, block_rows) of a piece are `stride_pm` apart, its columns `stride_pn`.
    signals: for each owner, the address of its counters, one for each tile of its piece (see `signals_of_owner`):
    `stride_sm` apart from row to row of tiles, `stride_sn` from column to column.

    Then `out`, with the strides of a piece, becomes the sum of this rank's own piece of all ranks: of all `pieces`,
    which are `piece_size` elements apart. A tile of it is complete when `parts` times its row's element of `arrivals`
    is counted. piece_rows: the number of rows to sum up.

    A persistent kernel, whose programs take tiles by `tickets`, a counter that is 0 before and after: first those to
    multiply, row tiles in the given `order`, then those to sum up. What a sum waits for is being computed, here and on
    all other ranks, whose programs never wait before; so any number of programs may run at a time.

    DESCRIPTORS: `left` and `right` are tensor descriptors of one matrix each (K x M and N x K where TRANSPOSED).
    """
    tiles_of_matrix = tl.cdiv(M, BLOCK_M)
    row_tiles = matrices * tiles_of_matrix
    column_tiles = tl.cdiv(N, BLOCK_N)
    tile = take_ticket(tickets)
    while tile < row_tiles * column_tiles:
        position, column_tile = place_of_tile(tile, row_tiles, column_tiles, BAND)
        row_tile = tl.load(order + position)
        matrix = (row_tile // tiles_of_matrix).to(tl.int64)
        row = row_tile % tiles_of_matrix * BLOCK_M
        column = column_tile * BLOCK_N
        height = M - row
        width = N - column
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
        start = row_tile // tiles_of_matrix * M + row
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
        stop = start + min(height, BLOCK_M)
        signal_owners(signals, start, stop, column_tile, stride_sm, stride_sn, block_rows, parts, BLOCK_M)
        tile = take_ticket(tickets)
    tile -= row_tiles * column_tiles
    sum_tiles = tl.cdiv(piece_rows, BLOCK_M)
    while tile < sum_tiles * column_tiles:
        row_tile, column_tile = place_of_tile(tile, sum_tiles, column_tiles, BAND)
        counters = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
        sum_tile(
            pieces,
            out,
            counters + row_tile * stride_sm + column_tile * stride_sn,
            tl.load(arrivals + row_tile) * parts,
            row_tile * BLOCK_M,
            column_tile * BLOCK_N,
            piece_rows,
            N,
            stride_pm,
            stride_pn,
            piece_size,
            parts,
            BLOCK_M,
            BLOCK_N,
            SUM_M,
            SUM_N,
        )
        tile = take_ticket(tickets) - row_tiles * column_tiles
    return_tickets(tickets, tile, sum_tiles * column_tiles)
