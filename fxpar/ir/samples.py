"""Where the samples of a batch are in a value, and so how values of parts of a batch make up that of the whole."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from fxpar.ir.layout import Shard


class Reduced(Enum):
    """What a value that depends on the batch, but has no known batch dim, is of the samples.

    SUM: their sum, or sums that are multiplied and added.
    COUNT: a number that each part of a batch is given for the whole batch, or is computed from such.
    MEAN: a sum divided by a number, such as that of the samples; or a linear function of such.
    LINEAR: another linear function of sums: from parts, the mean is known, but not the value for the whole batch.
    MAX: the largest.
    UNKNOWN: anything else.
    """

    SUM = "sum"
    COUNT = "count"
    MEAN = "mean"
    LINEAR = "linear"
    MAX = "max"
    UNKNOWN = "unknown"


Samples: TypeAlias = Shard | Reduced
"""For a value that depends on the batch: its batch dim, or the part of a dim that counts samples; else a `Reduced`."""
