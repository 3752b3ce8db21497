"""Replace a model's parameters by this rank's shards, and initialise them if the model is on the meta device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxpar._torch.compiler import TorchDispatchMode
from fxpar.core.philox import philox_uniform
from fxpar.errors import UninitializedModuleError
from fxpar.ir.dtensor import from_local, layout_of
from fxpar.ir.layout import Layout
from fxpar.ir.tiles import logical_box, shard_of
from fxpar.model.distribution import Distribution
from fxpar.model.logical_parameters import LogicalParameter
from fxpar.model.unset import is_unset, unset_like
from fxpar.progress.phases import as_phase
from fxpar.world.mesh import Mesh


@as_phase
def shard_parameters(
    distribution: Distribution, on_meta: Mapping[str, nn.Module], init_weights: Callable[[nn.Module], None] | None
) -> None:
    """Keep this rank's shards of its stages' parameters, as DTensors under their old names; drop all others.

    Args:
        on_meta: the modules that held meta tensors, by path: they are initialised where that is possible.
        init_weights: initialises a module; by default, its `reset_parameters`.

    Raises:
        UninitializedModuleError: a module on the meta device has buffers that are not initialised, and that no state
            dict can load.
    """
    pipe, placement = distribution.mesh.coordinate["pipe"], distribution.placement
    stage_mesh = distribution.mesh.stage_mesh  # once, since it takes longer to make than many a shard
    foreign: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for fqn, parameter in distribution.parameters.items():
        planned = distribution.final_plan.parameters[fqn]
        is_own = placement[planned.stage] == pipe
        piece = _piece(parameter, planned.layout, distribution.mesh, stage_mesh) if is_own else None
        for module, attribute in parameter.homes:
            if piece is not None:
                module._parameters[attribute] = piece
            elif (whole := module._parameters.pop(attribute)) is not None:
                foreign.setdefault(module, {})[attribute] = whole
    for path, module in on_meta.items():
        _initialize(module, path, distribution, foreign.get(module, {}), init_weights)
    _note_unset(on_meta, distribution)


def _piece(parameter: LogicalParameter, layout: Layout, mesh: Mesh, stage_mesh: DeviceMesh) -> nn.Parameter:
    module, attribute = parameter.homes[0]
    whole = module._parameters[attribute]
    assert whole is not None
    if whole.is_meta:
        local = unset_like(whole, layout.local_shape(mesh.coordinate), mesh.device_type)
    else:
        local = _own_shard(whole, layout, mesh)
    piece = nn.Parameter(from_local(local, layout, stage_mesh), requires_grad=parameter.requires_grad)
    if whole.grad is not None:
        piece.grad = from_local(_own_shard(whole.grad, layout, mesh), layout, stage_mesh)
    _carry_over(whole, piece)
    return piece


def _own_shard(whole: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    shard = shard_of(whole.detach(), layout, mesh.coordinate).to(mesh.device_type)
    return shard.clone(memory_format=torch.contiguous_format)


def _carry_over(whole: nn.Parameter, piece: nn.Parameter) -> None:
    """Give `piece` the attributes that a user has set on `whole`, and its hooks, which get gradients as DTensors."""
    vars(piece).update({name: value for name, value in vars(whole).items() if name not in vars(piece)})
    if not piece.requires_grad:
        return
    for hook in (whole._backward_hooks or {}).values():
        piece.register_hook(hook)
    for hook in (getattr(whole, "_post_accumulate_grad_hooks", None) or {}).values():
        piece.register_post_accumulate_grad_hook(hook)


def _initialize(
    module: nn.Module,
    path: str,
    distribution: Distribution,
    foreign: Mapping[str, nn.Parameter],
    init_weights: Callable[[nn.Module], None] | None,
) -> None:
    """Initialise a module by `init_weights` or by its `reset_parameters`.

    `foreign` are the module's parameters on other stages. They are put back, on the meta device, while it runs: the
    initialisation of a bias reads the shape of its weight, which another stage may hold.
    """
    initialize = init_weights or getattr(type(module), "reset_parameters", None)
    if initialize is None or not (any(True for _ in module.parameters(recurse=False)) or module._buffers):
        return
    module._parameters.update({name: nn.Parameter(p.to("meta"), p.requires_grad) for name, p in foreign.items()})
    try:
        with torch.no_grad(), _LogicalRandom(distribution.seed, path, distribution.mesh.coordinate):
            initialize(module)
    finally:
        for name in foreign:
            del module._parameters[name]


def _note_unset(on_meta: Mapping[str, nn.Module], distribution: Distribution) -> None:
    """Record the tensors that have no values yet, but can be loaded.

    Raises:
        UninitializedModuleError: a module has buffers that cannot be loaded.
    """
    saved = {id(value) for value in distribution.model.state_dict(keep_vars=True).values()}
    names = {id(parameter): name for name, parameter in distribution.own_parameters().items()}
    names |= {id(buffer): name for name, buffer in distribution.model.named_buffers() if id(buffer) in saved}
    for path, module in on_meta.items():
        tensors = {**module._parameters, **module._buffers}
        unset = {name: value for name, value in tensors.items() if value is not None and is_unset(value)}
        used = {name for name in unset if f"{path}.{name}".lstrip(".") not in distribution.foreign_buffers}
        lost = [name for name, value in unset.items() if name in used and id(value) not in names]
        if lost:
            raise UninitializedModuleError(path, lost)
        distribution.unset += [names[id(value)] for name, value in unset.items() if name in used]
    distribution.unset = list(dict.fromkeys(distribution.unset))


class _LogicalRandom(TorchDispatchMode):
    """A mode in which random fills of a DTensor draw by logical index: each rank draws its part of the same numbers.

    So initial values do not depend on the mesh.
    """

    def __init__(self, seed: int, path: str, coordinate: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._path, self._coordinate = seed, path, coordinate
        self._num_draws = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        fill = _RANDOM_FILLS.get(func)
        if fill is None or not (isinstance(args[0], DTensor) or args[0].is_meta):
            return func(*args, **(kwargs or {}))
        if not isinstance(args[0], DTensor):  # held by another stage: count its draws, so that streams agree
            fill(self._skip, *args[1:], **(kwargs or {}))
            return args[0]
        layout = layout_of(args[0])
        drawn = fill(lambda: self._draw(layout), *args[1:], **(kwargs or {}))
        args[0].to_local().copy_(drawn)
        return args[0]

    def _skip(self) -> Tensor:
        self._num_draws += 1
        return torch.empty(0, device="cpu")

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
    """The Box-Muller transform; 1 - u keeps the logarithm finite."""
    radius = torch.sqrt(-2.0 * torch.log1p(-draw()))
    return radius * torch.cos(2.0 * math.pi * draw()) * std + mean


_RANDOM_FILLS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.uniform_.default: _uniform,
    torch.ops.aten.normal_.default: _normal,
}
