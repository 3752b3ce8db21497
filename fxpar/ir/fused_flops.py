"""FLOP formulas of the fused ops, for PyTorch's FlopCounterMode and fxpar's estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import register_flop_formula

import fxpar.ir.fused_ops  # noqa: F401  registers the ops

Shape: TypeAlias = Sequence[int]


@register_flop_formula(torch.ops.fxpar.all_gather_matmul)
def _all_gather_matmul_flops(
    shard: Shape, others: Sequence[Shape], biases: object, form: str, outer: int, parts: int, *rest: Any, **named: Any
) -> int:
    """Twice the elements of each other matrix, times the dim of the gathered one that is not shared with it."""
    gathered, own = parts * shard[-2], shard[-1]
    match form:
        case "rows" | "columns":
            free = gathered
        case "sum_right" | "sum_left":
            free = own
        case _:
            free = shard[-2]
    return sum(2 * math.prod(other) * free for other in others)


@register_flop_formula([torch.ops.fxpar.matmul_reduce_scatter, torch.ops.fxpar.matmul_all_reduce])
def _matmul_flops(left: Shape, right: Shape, *rest: Any, **named: Any) -> int:
    """The FLOPs of the matmul; sums over ranks do not count."""
    return 2 * math.prod(left) * right[-1]
