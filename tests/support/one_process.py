"""A small model for the backend in one process, and a mesh of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar


def mesh_of_one_process() -> Iterator[fxpar.Mesh]:
    """A mesh of this process alone, without any launcher."""
    yield fxpar.init_mesh()
    dist.destroy_process_group()


class Net(nn.Module):
    """Returns the loss and the predictions; with `trouble`, does what fxpar cannot trace."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.trouble = trouble

    def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Any:
        h = self.norm(self.first(x)).relu()
        if self.trouble == "odd batch" and x.shape[0] % 2:
            raise ValueError(f"an even batch is needed, not {x.shape[0]}")
        if self.trouble == "graph break":
            torch._dynamo.graph_break()
        predicted = self.second(h) * scale
        if self.trouble == "no loss":
            return predicted
        if self.trouble == "object":
            return Held(predicted.sum())
        return {"loss": ((predicted - target) ** 2).mean(), "predicted": predicted, "rows": x.shape[0]}


class Held:
    """Nothing knows that it holds a tensor."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


ATEN = {"lowering": "aten"}


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randn(rows, 3)


def distributed(mesh: fxpar.Mesh, microbatches: int = 1, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxpar.distribute(Net(**kwargs), mesh, microbatches=microbatches)


def alone() -> nn.Module:
    torch.manual_seed(0)
    return Net()
