"""Functions that the kernels share: the next tile and its position, waiting for signals, and the product of a tile.

Letters: a product of M x K by K x N, in tiles of BLOCK_M x BLOCK_N, whose sums take BLOCK_K terms at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

STORED_COLUMNS = tl.constexpr(64)


@triton.jit
def take_ticket(tickets: tl.tensor) -> tl.tensor:
    """The number of the next piece of work, which no other program has taken.

    So a program that starts late, or whose tile waits, leaves work to the others. Tiles are taken in order: a program
    never waits for work that nobody has begun.
    """
    return tl.atomic_add(tickets, 1, sem="relaxed")


@triton.jit
def return_tickets(tickets: tl.tensor, ticket: tl.tensor, count: tl.tensor) -> None:
    """Reset the counter for the next kernel, if this is the last ticket of all: each program takes one too many."""
    if ticket == count + tl.num_programs(0) - 1:
        tl.store(tickets, 0)


@triton.jit
def place_of_tile(
    tile: tl.tensor, rows: tl.tensor, columns: tl.tensor, BAND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The (row, column) of a tile: bands of BAND rows one after another, each column by column, for cache hits."""
    in_band = BAND * columns
    first = tile // in_band * BAND
    height = min(rows - first, BAND)
    return first + tile % in_band % height, tile % in_band // height


@triton.jit
def wait_until(signal: tl.tensor, at_least: tl.tensor) -> tl.tensor:
    """Spin until `signal`, which a copy engine or another rank sets, is `at_least` or later (modulo 2^32); an acquire.

    Returns 0 (signals are never 2^30 ahead), computed from the signal's value: a load from an address that this is
    added to cannot be moved before the wait.
    """
    found = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while found - at_least < 0:
        found = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    return (found - at_least) >> 30  # a constant 0 would be folded by the compiler


@triton.jit
def product_by_pointers(
    left: tl.tensor,
    right: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    K: tl.tensor,
    stride_lm: tl.tensor,
    stride_lk: tl.tensor,
    stride_rk: tl.tensor,
    stride_rn: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """The product of a tile in float32, of the rows at `left` and the columns at `right`.

    height, width: the rows and columns from here on that exist; others are zero. WHOLE: the tile has no others, and K
    is a multiple of BLOCK_K. WIDEN: whether factors are converted to float32, which Triton's interpreter needs.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_left = m[:, None] * stride_lm + k[None, :] * stride_lk
    in_right = k[:, None] * stride_rk + n[None, :] * stride_rn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE:
            a = tl.load(left + in_left)
            b = tl.load(right + in_right)
        else:
            a = tl.load(left + in_left, mask=(m[:, None] < height) & (k[None, :] < K - start), other=0.0)
            b = tl.load(right + in_right, mask=(k[:, None] < K - start) & (n[None, :] < width), other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += BLOCK_K * stride_lk
        right += BLOCK_K * stride_rk
    return total


@triton.jit
def fence(zero: tl.tensor) -> tl.tensor:
    """Make what this thread has seen visible to the tensor copies that it starts (PTX: proxies); returns `zero`."""
    return tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def product_by_descriptors(
    left: tl.tensor,
    right: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    K: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEFT_TRANSPOSED: tl.constexpr,
    RIGHT_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """The product, in float32, of the tile at (row, column); elements outside of the factors are zero.

    The descriptors of transposed factors have the shapes of the memory: K x M and N x K.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = left.load([start, row]).T if LEFT_TRANSPOSED else left.load([row, start])
        b = right.load([column, start]).T if RIGHT_TRANSPOSED else right.load([start, column])
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def halves(total: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right half of a tile's columns.

    Kernels store `STORED_COLUMNS` columns at a time, since there are not enough registers for the addresses of more.
    """
    left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
    return left, right


@triton.jit
def plus_bias(
    total: tl.tensor,
    bias_at: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    stride_bm: tl.tensor,
    stride_bn: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    SAME_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """A tile plus the bias whose first element is at `bias_at`. SAME: it is the same for all rows, or all columns."""
    m = tl.arange(0, 1 if SAME_ROWS else BLOCK_M)[:, None]
    n = tl.arange(0, 1 if SAME_COLUMNS else BLOCK_N)[None, :]
    terms = tl.load(bias_at + m * stride_bm + n * stride_bn, mask=(m < height) & (n < width), other=0.0)
    return total + terms.to(tl.float32)
