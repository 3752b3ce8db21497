"""Checked requests of `fxpar.reshard`: the tensor, its destination, and the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxpar._torch.distributed import StridedShard
from fxpar.errors import ReshardError
from fxpar.hardware.network import Network
from fxpar.resharding.plan import ReshardPlan, make_plan
from fxpar.resharding.tile import Tile, tiles_of_placements

AxisSpec: TypeAlias = Sequence[str | Sequence[str] | None]
"""The mesh axis, or axes, that shard each dim of a tensor."""


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The strategy, the algorithm that orders transfers, the network, and how long one message may take."""

    strategy: str
    algorithm: str
    network: Network
    timeout_s: float


@dataclass(frozen=True, slots=True)
class End:
    """A mesh, and the placements of a tensor on it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{self.mesh.mesh.tolist()} {self.mesh.mesh_dim_names or ''} {list(self.placements)}"


@dataclass(frozen=True, slots=True)
class Request:
    """A tensor to move from source to destination; hashable, and checked."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: End
    destination: End
    how: ReshardOptions

    @property
    def holds(self) -> bool:
        """Whether this rank holds a piece of the source."""
        return self.source.mesh.get_coordinate() is not None

    def facts(self) -> dict[str, str]:
        """Descriptions, by name, of all that must be the same on every rank."""
        return {
            "the shape": str(self.shape),
            "the dtype": str(self.dtype),
            "the source": str(self.source),
            "the destination": str(self.destination),
            "the way": str(self.how),
        }

    def tiles(self, end: End) -> dict[int, Tile]:
        """The tile of each rank at one end."""
        return tiles_of_placements(self.shape, end.mesh, end.placements)

    def plan(self, hosts: tuple[int, ...]) -> ReshardPlan:
        """The plan, cached."""
        return _plan(self, hosts)


@lru_cache(maxsize=256)
def _plan(request: Request, hosts: tuple[int, ...]) -> ReshardPlan:
    ends = request.tiles(request.source), request.tiles(request.destination)
    how = request.how
    return make_plan(*ends, request.dtype.itemsize, hosts, how.strategy, how.algorithm, network=how.network)


def make_request(
    tensor: DTensor,
    mesh: DeviceMesh,
    layout: Sequence[Placement] | AxisSpec,
    how: ReshardOptions,
) -> Request:
    """The request to move `tensor` to `mesh`.

    Raises:
        ReshardError: the tensor, the meshes or the layout do not match.
    """
    if not isinstance(tensor, DTensor):
        raise ReshardError(
            f"expected a DTensor, found {type(tensor).__name__}; distribute_tensor makes one of a tensor"
        )
    if any(placement.is_partial() for placement in tensor.placements):
        raise ReshardError(
            f"the tensor has partial values ({list(tensor.placements)}): reduce them first, with tensor.redistribute"
        )
    for which, checked in (("the tensor's mesh", tensor.device_mesh), ("dst_mesh", mesh)):
        _check_world(which, checked)
    if mesh.device_type != tensor.device_mesh.device_type:
        raise ReshardError(f"dst_mesh is of {mesh.device_type}, but the tensor is on {tensor.device_mesh.device_type}")
    shape = tuple(tensor.shape)
    source = End(tensor.device_mesh, tuple(tensor.placements))
    return Request(shape, tensor.dtype, source, End(mesh, _placements(layout, mesh, shape)), how)


def _check_world(which: str, mesh: DeviceMesh) -> None:
    last = int(mesh.mesh.max())
    if last >= dist.get_world_size():
        raise ReshardError(
            f"{which} has rank {last}, but this world has {dist.get_world_size()} ranks; both meshes must be of the "
            "world that runs"
        )


def _placements(
    layout: Sequence[Placement] | AxisSpec, mesh: DeviceMesh, shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    given = tuple(layout)
    placements = tuple(entry for entry in given if isinstance(entry, Placement))
    if not placements:
        return _from_axes([entry for entry in given if not isinstance(entry, Placement)], mesh, shape)
    if len(placements) != len(given) or len(given) != mesh.ndim:
        raise ReshardError(f"dst_layout is {given}: expected {mesh.ndim} placements, one for each axis of dst_mesh")
    for placement in placements:
        if isinstance(placement, Shard | StridedShard):
            if not -len(shape) <= placement.dim < len(shape):
                raise ReshardError(f"dst_layout has {placement}, but the tensor has {len(shape)} dims")
        elif not isinstance(placement, Replicate):
            raise ReshardError(f"dst_layout has {placement}: expected shards and replicas")
    return placements


def _from_axes(spec: AxisSpec, mesh: DeviceMesh, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    names = mesh.mesh_dim_names or ()
    if len(spec) != len(shape):
        raise ReshardError(f"dst_layout is {tuple(spec)}: expected an entry for each of the tensor's {len(shape)} dims")
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        for axis in axes:
            if axis not in names:
                raise ReshardError(f"dst_layout names axis {axis!r}: dst_mesh has {list(names) or 'no named axes'}")
            if not isinstance(placements[names.index(axis)], Replicate):
                raise ReshardError(f"dst_layout uses axis {axis!r} twice")
            placements[names.index(axis)] = Shard(dim)
        if list(axes) != sorted(axes, key=names.index):
            raise ReshardError(f"dst_layout shards dim {dim} by {axes}: expected the order of dst_mesh, {names}")
    return tuple(placements)
