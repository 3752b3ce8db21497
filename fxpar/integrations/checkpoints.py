"""Checkpoints of a distributed model, as shards by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer


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
