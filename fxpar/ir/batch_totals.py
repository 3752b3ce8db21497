"""What a step computes of its whole batch before it begins, such as the number of targets that a loss is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from fxpar.ir.stage import Port

Extreme = Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Values that depend on sums over the samples of a batch, and on largest and smallest values, but on no parameter.

    `of_microbatch` (ATen) returns first the sums for one microbatch, from the values of the ports `inputs`, then the
    `extremes`. `of_batch` takes the sums for the whole batch, divided by the number of its parts (microbatches times
    batch shards), in float64 where `of_microbatch` returns integers; then the extremes for the whole batch; then the
    values of the ports `constants`, which all microbatches share. It returns the values of the ports `results`, which
    are to have the `dtypes`.
    """

    of_microbatch: fx.GraphModule
    inputs: tuple[Port, ...]
    extremes: tuple[Extreme, ...]
    of_batch: fx.GraphModule
    constants: tuple[Port, ...]
    results: tuple[Port, ...]
    dtypes: tuple[torch.dtype, ...]


def dtype_of_mean(total: Tensor) -> torch.dtype:
    """The dtype of the mean over the parts of a batch of which `total` is the sum."""
    return total.dtype if total.dtype.is_floating_point else torch.float64
