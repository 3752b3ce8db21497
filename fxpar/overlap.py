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


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which collectives run beside computation, by the rules of `overlap_collectives`.

    rules: those that apply; collectives of others are waited on where they start.
    gather_ahead_bytes: how many bytes of gathered values may wait for their first use.
    """

    rules: frozenset[OverlapRule] = frozenset(OVERLAP_RULES)
    gather_ahead_bytes: float = math.inf


NO_OVERLAP = Overlap(frozenset())
"""Every collective is waited on where it starts."""
