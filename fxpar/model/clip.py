"""The total norm of gradients over all stages and shards, and clipping by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, copy_context

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar._torch.clip_grad import replace_norms
from fxpar.ir.dtensor import layout_of
from fxpar.ir.layout import Shard
from fxpar.model.distribution import pipelines
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import mesh_of_this_world


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a distributed model in place so that their norm over all ranks is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, but each rank passes the parameters it holds, and all ranks must call it. One
    all-reduce. Returns the norm before clipping, which is the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, if `error_if_nonfinite`.
        PeerLostError: another rank has ended.
    """
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    with torch.no_grad():
        norm = _checked_norm(gradients, norm_type, error_if_nonfinite)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            _local(gradient).mul_(scale.to(gradient.dtype))
    return norm


_is_of_one_rank = ContextVar("whether PyTorch's own function clips, which not all ranks may have called", default=False)


@functools.cache
def let_torch_clip_over_stages() -> None:
    """From now on `torch.nn.utils.clip_grad_norm_` clips gradients of pipelines as `fxpar.clip_grad_norm_` does.

    PyTorch takes the norm of the gradients that a rank has, which on a pipeline are those of its stages: each stage
    would be clipped by another factor. A rank that has none of the parameters takes part with an empty list. A single
    parameter, given without a list, is in one stage alone, and so is its norm. The same holds for `get_total_norm`.
    """
    replace_norms(_clip_over_stages, _norm_over_stages)


def _clip_over_stages(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def clip(
        parameters: Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if (alive := pipelines()) and not isinstance(parameters, Tensor):
            parameters = list(parameters)
            identities = set(map(id, parameters))
            if not parameters or any(each.holds_any_of(identities) for each in alive):
                return clip_grad_norm_(parameters, max_norm, float(norm_type), error_if_nonfinite)
        context = copy_context()
        context.run(_is_of_one_rank.set, True)
        return context.run(plain, parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    return clip


def _norm_over_stages(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def norm(
        tensors: Iterable[Tensor] | Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if (alive := pipelines()) and not isinstance(tensors, Tensor) and not _is_of_one_rank.get():
            tensors = list(tensors)
            meshes = {each.mesh.stage_mesh for each in alive}
            if not tensors or any(isinstance(each, DTensor) and each.device_mesh in meshes for each in tensors):
                return _checked_norm(tensors, float(norm_type), error_if_nonfinite)
        return plain(tensors, norm_type, error_if_nonfinite, foreach)

    return norm


def _checked_norm(tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    norm = _norm_over_ranks(tensors, norm_type, _device_of(tensors))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of all gradients is {norm.item()}: expected a finite one")
    return norm


def _norm_over_ranks(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of the gradients of all ranks, of each element once. A collective of all ranks."""
    total = torch.zeros((), device=device)
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


def _device_of(held: Sequence[Tensor]) -> torch.device:
    """The device of this rank's parameters, or of its mesh if it has none."""
    if held:
        return held[0].device
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
