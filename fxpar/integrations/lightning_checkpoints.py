"""Checkpoints of a LightningModule as shards: a folder in the format of Lightning's FSDP strategy.

`python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER` makes the checkpoint of one process of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fxpar.integrations.lightning_steps import PREFIX, LightningSteps

_OTHERS = "meta.pt"
"""The file of all that is neither of the model nor of an optimizer."""

_OPTIMIZER = "optimizer_"
"""What stands before the number of an optimizer in the key of its state."""


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
    for key in [key for key, value in others.items() if _has_shards(value)]:
        states[key] = others.pop(key)
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
    copies = {key: tree_map_only(Tensor, torch.empty_like, states["model"]) for key in _other_weights(folder)}
    load({**states, **copies}, checkpoint_id=folder)
    set_model_state_dict(steps, {PREFIX + name: value for name, value in states["model"].items()})
    for key, optimizer in _by_key(optimizers).items():
        set_optimizer_state_dict(steps, optimizer, _renamed(states[key], lambda name: PREFIX + name))
    others: dict[str, Any] = torch.load(folder / _OTHERS, weights_only=weights_only)
    return {**others, **copies, "state_dict": states["model"]}


def _has_shards(value: Any) -> bool:
    """Whether an entry of a checkpoint has weights by name, as those which a callback averages from."""
    return isinstance(value, dict) and any(isinstance(each, DTensor) for each in value.values())


def _other_weights(folder: Path) -> list[str]:
    """The keys of the entries that `_has_shards` told of, when the folder was saved."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    keys = dict.fromkeys(name.partition(".")[0] for name in saved)
    return [key for key in keys if key != "model" and not key.startswith(_OPTIMIZER)]


def _by_key(of_optimizers: Sequence[Any]) -> dict[str, Any]:
    return {f"{_OPTIMIZER}{number}": value for number, value in enumerate(of_optimizers)}


def _renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """An optimizer's state dict with other names of parameters."""
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {rename(name): values for name, values in state["state"].items()}, "param_groups": groups}
