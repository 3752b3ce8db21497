"""Deep copies of a distributed model, such as one whose weights are averages, are distributed models of their own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fxpar.model.distribution import Distribution
from fxpar.model.logical import install


def allow_deep_copies(distribution: Distribution) -> None:
    """Let `copy.deepcopy` of the model, once its classes are installed, return a model by the same plan."""

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        found: nn.Module = memo.setdefault(id(self), type(self).__new__(type(self)))
        found.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        of_copy = distribution.of_copy(found)
        install(of_copy)
        allow_deep_copies(of_copy)
        return found

    type(distribution.model).__deepcopy__ = deep_copy  # type: ignore[attr-defined]
