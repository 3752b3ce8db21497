"""How much of the forward the backward recomputes, to save memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

POLICIES = ("none", "min_cut", "full")


@dataclass(frozen=True, slots=True)
class Remat:
    """How much of the forward runs once more in the backward.

    policy: one of `POLICIES`: "none"; "min_cut", cheap ops, where that saves memory; "full", every layer, from its
        inputs. A layer is what the outermost numbered module computes (an item of a `ModuleList`). Regions that the
        model itself checkpoints with `torch.utils.checkpoint` are always recomputed.
    gathered_bytes: how many bytes of gathered weights are kept for the backward, which gathers all others again.
    """

    policy: str = "none"
    gathered_bytes: float = math.inf


NO_REMAT = Remat()
"""Only what the model itself checkpoints runs twice."""
