"""A chain of layers with all that makes the storage of weights hard: for tests that train it on many ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UnevenChain(nn.Module):
    """Layers with biases, of sizes that few numbers divide; two are used twice, one is not, and a scale is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((10, 7), (7, 12), (12, 7), (7, 5)))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.layers[0](inputs) * self.frozen
        for _ in range(2):
            x = self.layers[2](self.layers[1](x).relu()).tanh()
        return F.mse_loss(self.layers[3](x), targets)


def chain_batch(size: int) -> dict[str, Tensor]:
    """Random inputs and targets."""
    return {"inputs": torch.randn(size, 10), "targets": torch.randn(size, 5)}


class SharedEmbedder(nn.Module):
    """The last layers call a module that the first stage calls, too, as in DiT: several parameters have two users."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Sequential(nn.Linear(10, 8), nn.SiLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 5)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.layers[0](self.embedder(inputs)).relu()
        x = self.layers[1](x).relu()
        return F.mse_loss(self.out(x * self.embedder(inputs.flip(1))), targets)
