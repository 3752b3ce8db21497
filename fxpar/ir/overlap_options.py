"""What users say of communication beside computation: which rules apply, and how much memory they may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

OverlapRule: TypeAlias = Literal["input_gradients", "reduce_scatters", "all_gathers"]
OVERLAP_RULES: tuple[OverlapRule, ...] = get_args(OverlapRule)

FUSE_ALWAYS = "always"
Fuse: TypeAlias = bool | Literal["always"]
"""Whether collectives become one op with matmuls beside them: where that is cheaper, never, or wherever it can be."""


HELD_REDUCTIONS = 2.0
"""So much that the next gradients can be reduced while a large one still is, and no more than a layer's are held: of a
transformer's layer, the largest weight is a third."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which collectives run beside computation, by the rules of `overlap_collectives`.

    rules: those that apply; collectives of others are waited on where they start.
    gather_ahead_bytes: how many bytes of gathered values may wait for their first use.
    held_reductions: how much memory reductions that only leave the graph may hold until they are waited for, as a
        multiple of what the largest of them takes; at the least it runs alone.
    """

    rules: frozenset[OverlapRule] = frozenset(OVERLAP_RULES)
    gather_ahead_bytes: float = math.inf
    held_reductions: float = HELD_REDUCTIONS


NO_OVERLAP = Overlap(frozenset())
"""Every collective is waited on where it starts."""
