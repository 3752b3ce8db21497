"""State dicts under the original names: saved as contiguous shards, loaded from shards or whole tensors."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fxpar.model.contiguous_shards import contiguous, placed_like
from fxpar.model.distribution import distribution_of_model
from fxpar.model.logical_parameters import names_of


def install_state_dict_hooks(model: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of a distributed model and its copies fit distributed checkpoints.

    A shard that starts inside its dim (q, k and v fused in one weight) is a strided shard, which
    `torch.distributed.checkpoint` refuses; `state_dict` returns contiguous shards instead. `load_state_dict` accepts
    these, or the whole tensors of a single-process checkpoint, and drops entries of other stages.
    """
    model.register_state_dict_post_hook(_after_state_dict)
    model.register_load_state_dict_pre_hook(_before_load)
    model.register_load_state_dict_post_hook(_after_load)


def _after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, held in state.items():
        if isinstance(held, DTensor):
            state[name] = contiguous(held)


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    distribution = distribution_of_model(module, "load_state_dict")
    own = dict(module.named_parameters(remove_duplicate=False))
    for names in names_of(distribution.parameters, module).values():
        for name in names:
            if prefix + name not in state:
                continue
            if name in own:
                held = own[name]
                assert isinstance(held, DTensor), "a distributed model's parameters are DTensors"
                state[prefix + name] = placed_like(state[prefix + name], held, distribution.mesh)
            else:
                del state[prefix + name]
    for name in distribution.foreign_buffers:
        state.pop(prefix + name, None)


def _after_load(module: nn.Module, incompatible: Any) -> None:
    # Modules such as BatchNorm add entries that an older checkpoint lacks, also for buffers of other stages.
    foreign = distribution_of_model(module, "load_state_dict").foreign_buffers
    incompatible.unexpected_keys[:] = [key for key in incompatible.unexpected_keys if key not in foreign]
