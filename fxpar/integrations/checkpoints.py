"""Checkpoints of a distributed model: as shards by all ranks, or whole on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxpar.model.distribution import Distribution


def save_shards(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Save the model and its optimizers in the format of `torch.distributed.checkpoint`. A collective."""
    save(_state(model, optimizers), checkpoint_id=folder)


def load_shards(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load what `save_shards` saved, on any mesh. A collective."""
    state = _state(model, optimizers)
    load(state, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizers"])


def _state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizers": optimizer_state}


def whole_state_dict(distribution: Distribution) -> dict[str, Tensor]:
    """The state dict of the model as one process has it, on the CPU of rank 0; empty on all other ranks. A collective.

    A stage's first rank has all of the stage's tensors in its memory, and rank 0 those of all stages.
    """
    mesh = distribution.mesh
    is_first_of_stage = not any(index for axis, index in mesh.coordinate.items() if axis != "pipe")
    of_stage: dict[str, Tensor] = {}
    for name, value in distribution.model.state_dict().items():
        if name in distribution.foreign_buffers:
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if is_first_of_stage:
            of_stage[name] = whole.cpu()
    if not is_first_of_stage or mesh.pipe == 1:
        return of_stage
    of_stages: list[dict[str, Tensor]] | None = [{}] * mesh.pipe if mesh.rank == 0 else None
    dist.gather_object(of_stage, of_stages, dst=0, group=mesh.group("pipe"))
    return {name: whole for stage in of_stages or () for name, whole in stage.items()}
