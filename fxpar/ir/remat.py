"""How much of the forward the backward computes again, for want of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

POLICIES = ("none", "min_cut", "full")


@dataclass(frozen=True, slots=True)
class Remat:
    """How much of the forward runs once more in the backward.

    policy: one of `POLICIES`: "none"; "min_cut", what is cheap, where that saves memory; "full", every layer, from what
        enters it. A layer is what the outermost numbered module makes (an item of a `ModuleList`). In any case the
        regions are computed again that the model itself checkpoints with `torch.utils.checkpoint`.
    gathered_bytes: how much of gathered weights is kept for the backward, which gathers all others again.
    """

    policy: str = "none"
    gathered_bytes: float = math.inf


NO_REMAT = Remat()
"""Nothing runs twice but what the model itself checkpoints."""
