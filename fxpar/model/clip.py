"""Clip gradients by their total norm over all stages and shards."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar._torch.total_norm import replace_total_norm
from fxpar.errors import PartOfPipelineError
from fxpar.ir.dtensor import layout_of
from fxpar.ir.layout import Shard
from fxpar.model.distribution import Distribution, all_distributions
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import mesh_of_this_world


def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a distributed model in place so that their norm over all ranks is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, but each rank passes the parameters it holds, which may be any part of the
    model, and all ranks must call it. One all-reduce. Returns the norm before clipping, the same on every rank.

    Raises:
        PeerLostError: another rank has ended.
    """
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    norm = _norm_over_ranks(gradients, norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        _local(gradient).mul_(scale.to(gradient.dtype))
    return norm


@functools.cache
def let_torch_clip_over_stages() -> None:
    """From now on `torch.nn.utils.clip_grad_norm_` clips gradients of distributed models by their norm over all ranks.

    PyTorch takes the norm of the gradients that a rank has, which on a pipeline are those of its stages: each stage
    would be clipped by another factor.
    """
    replace_total_norm(_norm_for_torch)


def _norm_for_torch(gradients: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """The norm over all ranks; None if PyTorch's own is right.

    Raises:
        PartOfPipelineError: the gradients are some of those that this rank has, and it is not known whether other
            stages have more of what the caller has in mind.
    """
    given = {id(gradient) for gradient in gradients}
    pipelines = [each for each in all_distributions() if each.mesh.pipe > 1]
    if not gradients:
        # All there is where nothing of a model is trained; or one of many calls, about what other stages have.
        return _norm_over_ranks([], norm_type) if any(not _gradients(each) for each in pipelines) else None
    for distribution in pipelines:
        held = _gradients(distribution)
        chosen = {fqn for fqn, gradient in held.items() if id(gradient) in given}
        if chosen and chosen != held.keys():
            if _is_in_one_stage(chosen, distribution):
                return None
            raise PartOfPipelineError(len(chosen), len(held))
    distributed = (gradient for each in all_distributions() for gradient in _gradients(each).values())
    is_distributed = any(id(gradient) in given for gradient in distributed)
    return _norm_over_ranks(gradients, norm_type) if is_distributed else None


def _gradients(distribution: Distribution) -> dict[str, Tensor]:
    """The gradients that this rank has of a model, by the names of parameters."""
    held = distribution.own_parameters()
    return {fqn: parameter.grad for fqn, parameter in held.items() if parameter.grad is not None}


def _is_in_one_stage(chosen: Set[str], distribution: Distribution) -> bool:
    """Whether this rank has all parameters of the innermost module that all of the chosen ones belong to."""
    module = os.path.commonpath([fqn.replace(".", "/") for fqn in chosen]).replace("/", ".")
    inside = {fqn for fqn in distribution.parameters if not module or f"{fqn}.".startswith(f"{module}.")}
    return inside <= distribution.own_parameters().keys()


def _norm_over_ranks(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of the gradients of all ranks, of each element once. A collective of all ranks."""
    total = torch.zeros((), device=_device_of(gradients))
    for gradient in gradients:
        local = _local(gradient)
        if norm_type == math.inf:
            total = torch.maximum(total, local.abs().max() if local.numel() else total)
        else:
            total += local.norm(norm_type).pow(norm_type) / _copies(gradient)
    if _world_size() > 1:
        with naming_lost_peers("the norm of all gradients"):
            dist.all_reduce(total, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM)
    return total if norm_type == math.inf else total.pow(1.0 / norm_type)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _device_of(gradients: Sequence[Tensor]) -> torch.device:
    """The device of this rank's gradients, or of its mesh if it has none."""
    if gradients:
        return gradients[0].device
    mesh = mesh_of_this_world()
    return torch.device("cpu" if mesh is None else mesh.device_type)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _copies(gradient: Tensor) -> int:
    """How many ranks hold each element of `gradient`; of a plain tensor, all."""
    if not isinstance(gradient, DTensor):
        return _world_size()
    parts = math.prod(shard.parts for _, shard in layout_of(gradient).axes if isinstance(shard, Shard))
    return gradient.device_mesh.size() // parts
