"""The state dict of a distributed model as one process has it, and a warning where a file would have a part of it."""

from __future__ import annotations

import functools
import warnings

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar._torch.pickled_dtensors import call_before_pickling
from fxpar.model.distribution import all_distributions, distribution_of_model
from fxpar.world.lost_peers import naming_lost_peers


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a distributed model as one process has it, on the CPU of rank 0; empty on all other ranks.

    A collective of all ranks. A stage's first rank has all of the stage's tensors in its memory, and rank 0 those of
    all stages: `fxpar.save_pretrained` needs that of one tensor.

        state = fxpar.whole_state_dict(model)
        if mesh.rank == 0:
            torch.save(state, "model.pt")

    Args:
        model: what `fxpar.distribute` returned, or `torch.compile` of it.

    Raises:
        PlainModelError: the model was not distributed.
        PeerLostError: another rank has ended.
    """
    distribution = distribution_of_model(model, "fxpar.whole_state_dict")
    mesh = distribution.mesh
    is_first_of_stage = not any(index for axis, index in mesh.coordinate.items() if axis != "pipe")
    of_stage: dict[str, Tensor] = {}
    with naming_lost_peers("the state of the model"):
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


@functools.cache
def warn_of_partial_files() -> None:
    """From now on a warning tells, once, that `torch.save` stores this rank's part of a distributed model."""
    call_before_pickling(lambda value: _warn_once() if _is_partial(value) else None)


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "what torch.save or pickle stores of a distributed model is the part that this rank has: the shards of its own "
        "stages. Nothing is lost if all ranks save files of their own, for the same mesh. For one file, call "
        "fxpar.whole_state_dict(model) on all ranks, and save what rank 0 gets; with optimizers, for any mesh, use "
        "torch.distributed.checkpoint",
        stacklevel=4,
    )


def _is_partial(value: DTensor) -> bool:
    meshes = [each.mesh for each in all_distributions() if each.mesh.stage_mesh == value.device_mesh]
    is_sharded = any(placement.is_shard() for placement in value.placements)
    return any(mesh.pipe > 1 or is_sharded for mesh in meshes)
