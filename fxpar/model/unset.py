"""Find the tensors of a model built on the meta device that have no values yet."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar._torch.compiler import never_compiled
from fxpar.errors import NotLoadedError
from fxpar.model.distribution import Distribution


def unset_like(tensor: Tensor, shape: tuple[int, ...], device_type: str) -> Tensor:
    """A tensor of `shape` filled with a marker (NaN, or the least integer), by which `is_unset` recognizes it.

    The marker is in the content, since checkpoints write in place, where no hook is called.
    """
    unset = torch.empty(shape, dtype=tensor.dtype, device=device_type)
    marker = _marker(tensor.dtype)
    return unset if marker is None else unset.fill_(marker)


def is_unset(tensor: Tensor) -> bool:
    """Whether `tensor`, or this rank's piece of it, is as `unset_like` made it; False for dtypes without a marker."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    marker = _marker(local.dtype)
    if marker is None or local.numel() == 0:
        return False
    found = local.isnan() if isinstance(marker, float) else local == marker
    return bool(found.all())


def _marker(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return torch.iinfo(dtype).min if dtype.is_signed else None


def place_buffers(model: nn.Module, device_type: str) -> dict[str, nn.Module]:
    """Move buffers to the device; those on meta become unset. Returns the modules that held meta tensors, by path."""
    found = {}
    moved: dict[Tensor, Tensor] = {}
    for path, module in model.named_modules():
        if any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            found[path] = module
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = unset_like(buffer, tuple(buffer.shape), device_type)
            elif buffer is not None and buffer.device.type != device_type:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device_type)
                module._buffers[name] = moved[buffer]
    return found


@never_compiled  # it runs before what Dynamo is to capture
def check_loaded(distribution: Distribution) -> None:
    """Check that all tensors that were unset have values by now.

    Raises:
        NotLoadedError: names those that have none.
    """
    if not distribution.unset:
        return
    model = distribution.model
    held: dict[str, Tensor] = dict(distribution.own_parameters())
    held |= {n: b for n, b in model.named_buffers(remove_duplicate=False) if n not in distribution.foreign_buffers}
    distribution.unset = [name for name in distribution.unset if name in held and is_unset(held[name])]
    if distribution.unset:
        raise NotLoadedError(distribution.unset)
