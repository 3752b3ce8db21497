"""State dicts under the original names: saved as contiguous shards, loaded from shards or whole tensors."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fxpar.model.contiguous_shards import contiguous, placed_like
from fxpar.model.distribution import Distribution
from fxpar.model.logical_parameters import names_of


def install_state_dict_hooks(distribution: Distribution) -> None:
    """Make `state_dict` and `load_state_dict` of the distributed model work with distributed checkpoints.

    A shard that starts inside its dim (q, k and v fused in one weight) is a strided shard, which
    `torch.distributed.checkpoint` refuses; `state_dict` returns contiguous shards instead. `load_state_dict` accepts
    these, or the whole tensors of a single-process checkpoint, and drops entries of other stages.
    """

    def after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, held in state.items():
            if isinstance(held, DTensor):
                state[name] = contiguous(held)

    def before_load(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        own = dict(distribution.model.named_parameters(remove_duplicate=False))
        for names in names_of(distribution.parameters, distribution.model).values():
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

    def after_load(module: nn.Module, incompatible: Any) -> None:
        # Modules such as BatchNorm add entries that an older checkpoint lacks, also for buffers of other stages.
        unexpected = [key for key in incompatible.unexpected_keys if key not in distribution.foreign_buffers]
        incompatible.unexpected_keys[:] = unexpected

    distribution.model.register_state_dict_post_hook(after_state_dict)
    distribution.model.register_load_state_dict_pre_hook(before_load)
    distribution.model.register_load_state_dict_post_hook(after_load)
