"""PyTorch's counts of the operations of attention, with fewer heads of keys than of queries, too."""

from collections.abc import Callable
from functools import wraps

import torch
from torch.utils import flop_counter


def _of_shared_keys(count: Callable[..., int]) -> Callable[..., int]:
    """`count`, which in torch 2.11 refuses such shapes (..., query, key, value): each head of keys serves several."""

    @wraps(count)
    def counted(*shapes: tuple[int, ...]) -> int:
        *before, query, key, value = shapes
        key, value = ((batch, query[1], *rest) for batch, _, *rest in (key, value))
        return count(*before, query, key, value)

    return counted


if torch.__version__ < "2.12":
    # Looked up there by the formulas of PyTorch's registry.
    flop_counter.sdpa_flop_count = _of_shared_keys(flop_counter.sdpa_flop_count)
    flop_counter.sdpa_backward_flop_count = _of_shared_keys(flop_counter.sdpa_backward_flop_count)

FlopCounterMode = flop_counter.FlopCounterMode
flop_registry = flop_counter.flop_registry
sdpa_flop_count: Callable[..., int] = flop_counter.sdpa_flop_count
sdpa_backward_flop_count: Callable[..., int] = flop_counter.sdpa_backward_flop_count
