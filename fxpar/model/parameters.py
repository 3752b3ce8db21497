"""Replace a model's parameters by this rank's pieces, and initialise them where the model came without numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar._torch import TorchDispatchMode
from fxpar.core.philox import philox_uniform
from fxpar.dtensor import from_local, layout_of
from fxpar.errors import UninitializedModuleError
from fxpar.layout import Layout
from fxpar.model.distribution import Distribution, LogicalParameter
from fxpar.tiles import logical_box, shard_of


def shard_parameters(distribution: Distribution, init_weights: Callable[[nn.Module], None] | None) -> None:
    """Keep this rank's piece of its stage's parameters, as DTensors under their old names; drop the others.

    Raises:
        UninitializedModuleError: a module on the meta device cannot initialise itself.
    """
    unset = _modules_on_meta(distribution.model)
    pipe, placement = distribution.mesh.coordinate["pipe"], distribution.placement
    for fqn, parameter in distribution.parameters.items():
        planned = distribution.final_plan.parameters[fqn]
        piece = _piece(parameter, planned.layout, distribution) if placement[planned.stage] == pipe else None
        for module, attribute in parameter.homes:
            if piece is None:
                del module._parameters[attribute]
            else:
                module._parameters[attribute] = piece
    _initialize(unset, distribution, init_weights)


def _piece(parameter: LogicalParameter, layout: Layout, distribution: Distribution) -> nn.Parameter:
    mesh = distribution.mesh
    module, attribute = parameter.homes[0]
    whole = module._parameters[attribute]
    assert whole is not None
    if whole.is_meta:
        local = torch.empty(layout.local_shape(mesh.coordinate), dtype=parameter.dtype, device=mesh.device_type)
    else:
        local = (
            shard_of(whole.detach(), layout, mesh.coordinate)
            .to(mesh.device_type)
            .clone(memory_format=torch.contiguous_format)
        )
    return nn.Parameter(from_local(local, layout, mesh.stage_mesh), requires_grad=parameter.requires_grad)


def _modules_on_meta(model: nn.Module) -> dict[str, nn.Module]:
    def on_meta(module: nn.Module) -> bool:
        return any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))

    return {path: module for path, module in model.named_modules() if on_meta(module)}


def _initialize(
    unset: Mapping[str, nn.Module], distribution: Distribution, init_weights: Callable[[nn.Module], None] | None
) -> None:
    if not unset:
        return
    seed = distribution.seed
    for path, module in unset.items():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=distribution.mesh.device_type)
        tensors = {**module._parameters, **module._buffers}
        if not tensors:
            continue
        initialize = init_weights or getattr(type(module), "reset_parameters", None)
        if initialize is None:
            raise UninitializedModuleError(path, sorted(tensors))
        with torch.no_grad(), _LogicalRandom(seed, path, distribution.mesh.coordinate):
            initialize(module)


class _LogicalRandom(TorchDispatchMode):
    """Inside, random fills of a DTensor draw by logical index: the same numbers on every mesh, and only this rank's."""

    def __init__(self, seed: int, path: str, coordinate: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._path, self._coordinate = seed, path, coordinate
        self._num_draws = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        fill = _RANDOM_FILLS.get(func)
        if fill is None or not isinstance(args[0], DTensor):
            return func(*args, **(kwargs or {}))
        layout = layout_of(args[0])
        drawn = fill(lambda: self._draw(layout), *args[1:], **(kwargs or {}))
        args[0].to_local().copy_(drawn)
        return args[0]

    def _draw(self, layout: Layout) -> Tensor:
        """Uniform numbers in [0, 1) of the local shape; a new stream at every call."""
        self._num_draws += 1
        stream = zlib.crc32(f"{self._path}/{self._num_draws}".encode())
        box = logical_box(layout, self._coordinate)
        numbers = philox_uniform(box.sizes, box.strides, box.offset, seed=self._seed, step=0, op=stream)
        return numbers.reshape(layout.local_shape(self._coordinate))


def _uniform(draw: Callable[[], Tensor], low: float = 0.0, high: float = 1.0, generator: None = None) -> Tensor:
    return draw() * (high - low) + low


def _normal(draw: Callable[[], Tensor], mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Tensor:
    """Box and Muller's transform; 1 - u keeps the logarithm finite."""
    radius = torch.sqrt(-2.0 * torch.log1p(-draw()))
    return radius * torch.cos(2.0 * math.pi * draw()) * std + mean


_RANDOM_FILLS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.uniform_.default: _uniform,
    torch.ops.aten.normal_.default: _normal,
}
