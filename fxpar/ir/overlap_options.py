"""Options for overlapping communication with computation: which rules apply, and the memory that they may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

OverlapRule: TypeAlias = Literal["input_gradients", "reduce_scatters", "all_gathers"]
OVERLAP_RULES: tuple[OverlapRule, ...] = get_args(OverlapRule)

FUSE_ALWAYS = "always"
Fuse: TypeAlias = bool | Literal["always"]
"""Whether collectives are fused with adjacent matmuls: where it is cheaper, never, or ("always") where possible."""


HELD_REDUCTIONS = 2.0
"""Enough to reduce the next gradients while a large one is in flight, and no more than the gradients of a layer: in a
transformer, the largest weight is a third of a layer."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which collectives overlap computation, by the rules of `overlap_collectives`.

    rules: those that apply; collectives of others are waited on where they start.
    gather_ahead_bytes: how many bytes of gathered values may wait for their first use.
    held_reductions: how much memory reductions that only leave the graph may hold until they are waited for, as a
        multiple of what the largest of them takes; that one can always run alone.
    """

    rules: frozenset[OverlapRule] = frozenset(OVERLAP_RULES)
    gather_ahead_bytes: float = math.inf
    held_reductions: float = HELD_REDUCTIONS


NO_OVERLAP = Overlap(frozenset())
"""Every collective is waited on where it starts."""
