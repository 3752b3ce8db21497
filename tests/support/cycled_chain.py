"""A small model that runs its layers several times, and keeps gradients for the last time only."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CYCLES = 8, 3


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class CycledChain(nn.Module):
    """Two layers between an embedding and a head; a parameter is first read where no gradient is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        x = embedded = self.embedding(values)
        for cycle in range(CYCLES):
            with nullcontext() if cycle == CYCLES - 1 else torch.no_grad():
                x = x + embedded
                for layer in self.layers:
                    x = layer(x)
        return F.mse_loss(self.head(x), targets)


def cycled_batch(size: int) -> dict[str, Tensor]:
    """Random values and targets."""
    return {name: torch.randn(size, WIDTH) for name in ("values", "targets")}
