"""Recurrent layers of PyTorch, which keep their parameters in a list besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def _flat_weights(self: nn.RNNBase) -> list[Tensor]:
    return [getattr(self, name) for name in self._flat_weights_names]


def _nothing(self: nn.RNNBase, *_: Any) -> None:
    """The list is made when it is read."""


RECURRENT_MEMBERS: Mapping[str, Any] = {
    "_flat_weights": property(_flat_weights, _nothing),
    "_update_flat_weights": _nothing,
    "flatten_parameters": _nothing,
}
"""What the class of a recurrent layer gets, so that its list has the parameters that the layer has now."""
