"""Split what a step is called with into microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Microbatches:
    """`count` microbatches.

    batch_dims: the dim along which each argument is split; those not named are shared by all microbatches.
    """

    count: int
    batch_dims: Mapping[str, int]

    def views(self, name: str, value: Tensor) -> Sequence[Tensor]:
        """What each microbatch has of an argument."""
        if name in self.batch_dims:
            return value.chunk(self.count, self.batch_dims[name])
        return [value] * self.count

    def pieces(self, name: str, value: Tensor) -> Sequence[Tensor]:
        """The same, contiguous."""
        if name in self.batch_dims:
            return [view.contiguous() for view in self.views(name, value)]
        return self.views(name, value.contiguous())
