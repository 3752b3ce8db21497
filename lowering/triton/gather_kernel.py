"""The matmul behind an all-gather: it starts before its left factor has arrived, and waits for rows tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from fxpar.lowering.triton.tile import (
    STORED_COLUMNS,
    fence,
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
def wait_for_rows(
    signals: tl.tensor,
    first_row: tl.tensor,
    last_row: tl.tensor,
    epoch: tl.tensor,
    block_rows: tl.tensor,
    segment_rows: tl.tensor,
    segments_per_block: tl.tensor,
) -> tl.tensor:
    """Wait for every segment that the rows touch (see `Segments.of_row`).

    Returns 0, computed from all their signals, so that loads at an address that it is added to come after the wait.
    """
    first = first_row // block_rows * segments_per_block + first_row % block_rows // segment_rows
    last = last_row // block_rows * segments_per_block + last_row % block_rows // segment_rows
    arrived = 0
    for segment in range(first, last + 1):
        arrived += wait_until(signals + segment, epoch)
    return arrived


@triton.jit
def store(
    total: tl.tensor,
    at: tl.tensor,
    bias_at: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
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
    """Store a tile, plus its bias if there is one; its first element goes to `at`.

    height, width: the rows and columns from here on that exist. WHOLE: the tile has no others.
    """
    if BLOCK_N > STORED_COLUMNS:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(total, BLOCK_M, BLOCK_N)
        right_bias = bias_at if bias_at is None else bias_at + HALF * stride_bn
        store(
            left,
            at,
            bias_at,
            height,
            width,
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
        store(
            right,
            at + HALF * stride_n,
            right_bias,
            height,
            width - HALF,
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
        rounded = total.to(at.dtype.element_ty)
        if WHOLE:
            tl.store(at + m * stride_m + n * stride_n, rounded)
        else:
            tl.store(at + m * stride_m + n * stride_n, rounded, mask=(m < height) & (n < width))


@triton.jit(do_not_specialize=["epoch"])
def multiply_gathered(
    left: tl.tensor,
    right: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    signals: tl.tensor,
    order: tl.tensor,
    tickets: tl.tensor,
    epoch: tl.tensor,
    matrices: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    block_rows: tl.tensor,
    segment_rows: tl.tensor,
    segments_per_block: tl.tensor,
    stride_rb: tl.tensor,
    stride_rk: tl.tensor,
    stride_rn: tl.tensor,
    stride_bb: tl.tensor,
    stride_bm: tl.tensor,
    stride_bn: tl.tensor,
    stride_ob: tl.tensor,
    stride_om: tl.tensor,
    stride_on: tl.tensor,
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
    TRANSPOSED: tl.constexpr,
    FENCED: tl.constexpr,
) -> None:
    """out[b] = left[b] @ right[b] + bias[b], (M, N) each, for every matrix b; left, (matrices, M, K), is contiguous.

    A persistent kernel, whose programs take tiles by `tickets`, a counter that is 0 before and after. Row tiles are
    computed in the `order` in which they arrive; a segment of rows (see `Segments`) has arrived when its element of
    `signals` is `epoch`.

    DESCRIPTORS: `left` and `right` are tensor descriptors of one matrix each (`right` is N x K if TRANSPOSED).
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
        start = row_tile // tiles_of_matrix * M + row
        last = start + min(height, BLOCK_M) - 1
        arrived = wait_for_rows(signals, start, last, epoch, block_rows, segment_rows, segments_per_block)
        if DESCRIPTORS:
            if FENCED:
                arrived = fence(arrived)
            total = product_by_descriptors(
                left,
                right,
                row + arrived,
                column,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                False,
                TRANSPOSED,
                PRECISION,
                WIDEN,
            )
        else:
            total = product_by_pointers(
                left + (start + arrived).to(tl.int64) * K,
                right + matrix * stride_rb + column.to(tl.int64) * stride_rn,
                height,
                width,
                K,
                K,
                1,
                stride_rk,
                stride_rn,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                WHOLE,
                PRECISION,
                WIDEN,
            )
        out_at = out + matrix * stride_ob + row.to(tl.int64) * stride_om + column.to(tl.int64) * stride_on
        bias_at = bias
        if bias is not None:
            bias_at = bias + matrix * stride_bb + row.to(tl.int64) * stride_bm + column.to(tl.int64) * stride_bn
        store(
            total,
            out_at,
            bias_at,
            height,
            width,
            stride_om,
            stride_on,
            stride_bm,
            stride_bn,
            BLOCK_M,
            BLOCK_N,
            WHOLE,
            SAME_ROWS,
            SAME_COLUMNS,
        )
        tile = take_ticket(tickets)
    return_tickets(tickets, tile, row_tiles * column_tiles)
