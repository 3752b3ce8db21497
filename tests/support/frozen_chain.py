"""A small model as users leave it: parts frozen, adapters, classes as one-hot rows, values kept on an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, WIDTH, RANK = 7, 8, 2


class Kept:
    """What a decoder's cache is: an object that the forward makes, fills and returns."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []


class Layer(nn.Module):
    """A residual layer with a low-rank adapter beside its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        h = self.linear(x) + self.up(self.down(x))
        kept.values.append(h)
        return x + torch.tanh(h)


class FrozenChain(nn.Module):
    """Three layers between an embedding and a head; with `tied`, the head uses the embedding, and trains it not."""

    def __init__(self, frozen: Sequence[str], *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.tied = tied
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))

    def forward(self, classes: Tensor, targets: Tensor) -> dict[str, Any]:
        """The loss, and what was kept."""
        kept = Kept()
        x = F.one_hot(classes, CLASSES).to(self.embedding.dtype) @ self.embedding
        for layer in self.layers:
            x = layer(x, kept)
        scores = x @ self.embedding.detach().t() if self.tied else self.head(x)
        return {"loss": F.cross_entropy(scores, targets), "kept": kept}


def class_batch(size: int) -> dict[str, Tensor]:
    """Random classes and targets."""
    return {name: torch.randint(0, CLASSES, (size,)) for name in ("classes", "targets")}
