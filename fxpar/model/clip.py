"""Clip gradients by their total norm over all stages and shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar.ir.dtensor import layout_of
from fxpar.ir.layout import Shard
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import mesh_of_this_world


def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a distributed model in place so that their norm over all ranks is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, but each rank passes the parameters it holds, and all ranks must call it. One
    all-reduce. Returns the norm before clipping, which is the same on every rank.

    Raises:
        PeerLostError: another rank has ended.
    """
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    locals_ = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    total = torch.zeros((), device=_device_of(held))
    for gradient, local in zip(gradients, locals_, strict=True):
        if norm_type == math.inf:
            total = torch.maximum(total, local.abs().max() if local.numel() else total)
        else:
            total += local.norm(norm_type).pow(norm_type) / _copies(gradient)
    if dist.is_initialized() and dist.get_world_size() > 1:
        with naming_lost_peers("the norm of all gradients"):
            dist.all_reduce(total, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM)
    norm = total if norm_type == math.inf else total.pow(1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for local in locals_:
        local.mul_(scale.to(local.dtype))
    return norm


def _device_of(held: Sequence[Tensor]) -> torch.device:
    """The device of this rank's parameters, or of its mesh if it has none."""
    if held:
        return held[0].device
    mesh = mesh_of_this_world()
    return torch.device("cpu" if mesh is None else mesh.device_type)


def _copies(gradient: Tensor) -> int:
    """How many ranks hold each element of `gradient`."""
    if not isinstance(gradient, DTensor):
        return 1
    parts = math.prod(shard.parts for _, shard in layout_of(gradient).axes if isinstance(shard, Shard))
    return gradient.device_mesh.size() // parts
