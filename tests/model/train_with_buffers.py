"""Train a model with running statistics, save it and load it elsewhere; what ranks of a test run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxpar

MICROBATCHES, STEPS, ROWS = 2, 2, 8


class Normed(nn.Module):
    """Two layers with running statistics, which also read a table that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("unsaved", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x)) * self.table * self.unsaved
        return x.square().mean()


def seeded() -> Normed:
    torch.manual_seed(0)
    return Normed()


def rows_of(batch_shard: int) -> Tensor:
    """The local batch of one batch shard."""
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(batch_shard))


def statistics_of_the_first_shard() -> dict[str, Tensor]:
    """The state dict of one process that ran the first shard's microbatches in order, and counted steps."""
    model = seeded()
    for _ in range(STEPS):
        for rows in rows_of(0).chunk(MICROBATCHES):
            model(rows)
    state = model.state_dict()
    return state | {name: torch.tensor(STEPS) for name in state if name.endswith("num_batches_tracked")}


def train_and_save(directory: Path, sizes: dict[str, int], with_example: bool) -> dict[str, Tensor]:
    """What the state dict of this rank has after some steps on a mesh; it is saved from all ranks."""
    mesh = fxpar.init_mesh(**sizes)
    model, rows = seeded(), rows_of(fxpar.batch_rank(mesh))
    distribute(model, mesh, rows, with_example=with_example)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    for _ in range(STEPS):
        step(rows).backward()
    state: dict[str, Any] = model.state_dict()
    dcp.save(state, checkpoint_id=directory)
    return whole(state)


def load(directory: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    """What a fresh model on another mesh has after loading, before anything ran."""
    mesh = fxpar.init_mesh(**sizes)
    model = Normed()
    distribute(model, mesh, rows_of(0), with_example=True)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=directory)
    model.load_state_dict(state)
    return whole(model.state_dict())


def distribute(model: nn.Module, mesh: fxpar.Mesh, rows: Tensor, *, with_example: bool) -> None:
    """One block per stage where there are two pipe ranks."""
    fxpar.distribute(
        model,
        mesh,
        stages=["blocks.1"] if mesh.pipe == 2 else None,
        microbatches=MICROBATCHES,
        example_inputs=(rows,) if with_example else None,
    )


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Every entry as a whole tensor."""
    tensors = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {name: value.detach().clone() for name, value in tensors.items()}


def train_save_and_load(directory: Path) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The states of training with and without example inputs, and that of a model loaded on another mesh."""
    mesh = {"pipe": 2, "data": 2}
    trained = [train_and_save(directory / str(known), mesh, known) for known in (True, False)]
    return trained, load(directory / "False", {"z": 2, "x": 2})
