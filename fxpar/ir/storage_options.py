"""When weights that are stored in shards are gathered, and when their gradients are reduced to shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

STEP, MICROBATCH, AUTO = "step", "microbatch", "auto"
TIMES = (STEP, MICROBATCH, AUTO)


@dataclass(frozen=True, slots=True)
class Storage:
    """Whether weights are gathered, and whether gradients are reduced, once per step; else for every microbatch."""

    gathers_once: bool
    reduces_once: bool


def storage_choices(gather_weights: str, reduce_gradients: str, microbatches: int, parts: int) -> list[Storage]:
    """The choices that the options of these names leave open, the best first: the first that fits into memory is used.

    Once per step means the least communication, but gathered weights and whole gradients are in memory all the time.
    A single microbatch communicates as much either way, and can overlap it with its computation. `parts` is the number
    of shards that weights are stored in; with one there is no choice.
    """
    if parts == 1:
        return [Storage(False, False)]
    automatic = (MICROBATCH,) if microbatches == 1 else (STEP, MICROBATCH)

    def left_open(given: str) -> Sequence[str]:
        return automatic if given == AUTO else (given,)

    return [
        Storage(gather == STEP, reduce == STEP)
        for gather, reduce in product(left_open(gather_weights), left_open(reduce_gradients))
    ]
