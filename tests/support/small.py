"""A model of three layers, whose weights are always the same, for tests of what scripts do to a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Small(nn.Module):
    """Two linear layers with an activation between them; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()
