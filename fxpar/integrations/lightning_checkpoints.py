"""Checkpoints of a LightningModule as shards: a folder in the format of Lightning's FSDP strategy.

`python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER` makes the checkpoint of one process of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from fxpar.integrations.lightning_steps import PREFIX, LightningSteps

_OTHERS = "meta.pt"
"""The file of all that is neither of the model nor of an optimizer."""


def model_state(steps: LightningSteps) -> dict[str, Any]:
    """This rank's shards, by the names in the LightningModule."""
    return {name.removeprefix(PREFIX): value for name, value in get_model_state_dict(steps).items()}


def optimizer_state(steps: LightningSteps, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's shards of an optimizer's state, by the names in the LightningModule. A collective."""
    return _renamed(get_optimizer_state_dict(steps, optimizer), lambda name: name.removeprefix(PREFIX))


def save_checkpoint(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Save what a Trainer has gathered for a checkpoint. A collective."""
    others = dict(checkpoint)
    states = {"model": others.pop("state_dict"), **_by_key(others.pop("optimizer_states", []))}
    if dist.get_rank() == 0 and folder.is_file():
        folder.unlink()
    save(states, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(others, folder / _OTHERS)


def load_checkpoint(
    folder: Path, steps: LightningSteps, optimizers: Sequence[Optimizer], weights_only: bool | None
) -> dict[str, Any]:
    """Load the model and its optimizers, on any mesh, and return the rest. A collective."""
    states = {"model": model_state(steps), **_by_key([optimizer_state(steps, optimizer) for optimizer in optimizers])}
    load(states, checkpoint_id=folder)
    set_model_state_dict(steps, {PREFIX + name: value for name, value in states["model"].items()})
    for key, optimizer in _by_key(optimizers).items():
        set_optimizer_state_dict(steps, optimizer, _renamed(states[key], lambda name: PREFIX + name))
    others: dict[str, Any] = torch.load(folder / _OTHERS, weights_only=weights_only)
    return others


def _by_key(of_optimizers: Sequence[Any]) -> dict[str, Any]:
    return {f"optimizer_{number}": value for number, value in enumerate(of_optimizers)}


def _renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """An optimizer's state dict with other names of parameters."""
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {rename(name): values for name, values in state["state"].items()}, "param_groups": groups}
