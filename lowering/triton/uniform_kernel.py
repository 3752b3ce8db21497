"""Uniform numbers by logical index on GPUs: the bits that csrc/philox.cpp draws on CPUs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draw_uniform(
    out: tl.tensor,
    stream: tl.tensor,
    dims: tl.tensor,
    offset: tl.tensor,
    span: tl.tensor,
    count: tl.tensor,
    NDIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWN: tl.constexpr,
) -> None:
    """Fill `out`, contiguous and of `count` elements, with the numbers of a strided box of a logical tensor.

    stream: of `fxpar.ir.random`: seed, step, microbatch, number of the op; loaded here, so that the CPU never waits.
    dims: int64 (NDIM, 2), the size and the stride of each dim of the box, the last one first.
    DRAWN: 4 if each four elements of `out` are a block of the cipher, which is then encrypted once; else 1.
    """
    seed, step = tl.load(stream), tl.load(stream + 1)
    microbatch, number = tl.load(stream + 2), tl.load(stream + 3)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    rest = first + tl.arange(0, BLOCK // DRAWN) * DRAWN
    index = offset + microbatch * span + tl.zeros([BLOCK // DRAWN], tl.int64)
    for dim in tl.static_range(NDIM):
        size = tl.load(dims + 2 * dim)
        index += rest % size * tl.load(dims + 2 * dim + 1)
        rest = rest // size
    block, none = index // 4, tl.zeros([BLOCK // DRAWN], tl.uint32)
    words = tl.philox(
        seed, block.to(tl.uint32), (block >> 32).to(tl.uint32), number.to(tl.uint32) + none, step.to(tl.uint32) + none
    )
    if DRAWN == 4:
        word = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape([BLOCK])
    else:  # each element encrypts its whole block, of which it uses a quarter
        place = index % 4
        low = tl.where(place == 0, words[0], words[1])
        high = tl.where(place == 2, words[2], words[3])
        word = tl.where(place < 2, low, high)
    at = first + tl.arange(0, BLOCK)
    tl.store(out + at, (word >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=at < count)  # 2^-24
