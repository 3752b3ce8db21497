"""Ways for a rank to multiply two matrices without a collective; a fused op is compared with the fastest of them.

A fused op divides its product into the rows of each rank, these into chunks, and wide chunks into blocks of columns.
Cache use may be better or worse then, and a library may be faster for one storage order of the right factor. What a
fused op gains in this way is no hidden communication, so its baseline may do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from fxpar.lowering.cpu.multiply import multiply_one
from fxpar.lowering.cpu.pieces import Pieces, gathered_ends, scattered_ends
from fxpar.lowering.cpu.terms import Terms

Multiply: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies a left factor by a fixed right factor; the next call overwrites the result."""

MATMULS = tuple(
    f"matmul {division}, right factor {storage}"
    for division in ("as a whole", "in blocks of columns", "in the chunks of the fused op")
    for storage in ("by rows", "transposed")
)


def matmuls(op: str, right: Tensor, num_rows: int, hosts: Sequence[int]) -> dict[str, Multiply]:
    """Every way by its name in `MATMULS`.

    Args:
        op: "gather" or "scatter": the fused op whose chunks are used.
        right: (k, n), stored transposed, like a layer's weight.
        num_rows: of the left factor.
        hosts: the host of every rank, which determines the chunks.
    """
    out = right.new_empty(num_rows, right.shape[1])
    pieces = Pieces.equal(1, len(hosts), num_rows // len(hosts))
    # The collective sends a piece of the left factor, or of the product.
    moved = right.new_empty(pieces.rows[0], right.shape[0 if op == "gather" else 1])
    ends = (gathered_ends if op == "gather" else scattered_ends)(hosts, moved, 0)
    factors = (right.contiguous(), right)
    found: list[Multiply] = [partial(_whole, out, factor) for factor in factors]
    found += [partial(_in_blocks, out, factor) for factor in factors]
    found += [partial(_in_chunks, out, factor, pieces, ends) for factor in factors]
    return dict(zip(MATMULS, found, strict=True))


def _whole(out: Tensor, right: Tensor, left: Tensor) -> Tensor:
    return torch.mm(left, right, out=out)


def _in_blocks(out: Tensor, right: Tensor, left: Tensor) -> Tensor:
    multiply_one(out, left, right)
    return out


def _in_chunks(out: Tensor, right: Tensor, pieces: Pieces, ends: Sequence[float], left: Tensor) -> Tensor:
    terms = Terms(left, right, None, "rows", pieces)
    for part in range(len(pieces.rows)):
        for chunk in pieces.chunks(part, ends):
            terms.compute(part, chunk, pieces.box(out, 0, part, chunk))
    return out
