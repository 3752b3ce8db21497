"""Resharding of DTensors between any two meshes of one world: `fxpar.reshard` and `fxpar.plan_reshard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxpar.agreement import check_agreement
from fxpar.errors import ReshardError
from fxpar.hosts import discover_hosts
from fxpar.reshard.plan import ReshardPlan, make_plan
from fxpar.reshard.tile import Tile, tiles_of_placements
from fxpar.runtime.buffers import Buffers
from fxpar.runtime.routes import Move, open_routes
from fxpar.runtime.side import Side
from fxpar.runtime.transport import TAG_KINDS
from fxpar.runtime.way import Way

AxisSpec: TypeAlias = Sequence[str | Sequence[str] | None]
"""For every dim of a tensor the mesh axis, or axes, that shard it."""

_FIRST_TAG = 1 << 24
"""Below are the tags of compiled steps."""


def reshard(
    tensor: DTensor,
    dst_mesh: DeviceMesh,
    dst_layout: Sequence[Placement] | AxisSpec,
    *,
    strategy: str = "broadcast",
    algorithm: str = "best",
    timeout_s: float = 300.0,
) -> DTensor:
    """The same tensor on another mesh, or laid out otherwise.

    A collective of the whole world: every rank calls it, also where it is in one of the meshes or in neither. The
    result carries no gradient history.

    Args:
        tensor: on a mesh of this world, without partial values.
        dst_mesh: a mesh of this world; it may share ranks with the tensor's.
        dst_layout: one placement per mesh axis, or for every tensor dim the axis (or axes) that shard it, or None.
        strategy: `broadcast`, `send_recv`, `local_allgather` or `global_allgather` (Zhuang et al., section 3.1).
        algorithm: which chooses senders and order: `best`, `greedy`, `depth_first`, `balance` or `naive`.
        timeout_s: how long one message may take.

    Raises:
        ReshardError: a mesh or a layout does not fit; nothing has moved.
        PlanMismatchError: the ranks disagree about the tensor or where it shall go; nothing has moved.
        UnknownStrategyError, UnknownAlgorithmError: no such name.
        PeerLostError: a rank died, or took too long.
    """
    request = _request(tensor, dst_mesh, dst_layout, strategy, algorithm)
    check_agreement(request.facts())
    route, needed = _open(request, timeout_s)
    piece = torch.empty(needed.shape if needed else 0, dtype=tensor.dtype, device=tensor.device)
    receipt = route.post_receive(piece, 0)
    if request.holds:
        local = tensor.to_local().detach()
        shipment = route.send(local, 0)
        route.keep(local, receipt)
        route.wait(receipt)
        route.complete(shipment)
    else:
        route.wait(receipt)
    route.finish()
    return DTensor.from_local(
        piece, dst_mesh, request.destination.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def plan_reshard(
    tensor: DTensor,
    dst_mesh: DeviceMesh,
    dst_layout: Sequence[Placement] | AxisSpec,
    *,
    strategy: str = "broadcast",
    algorithm: str = "best",
    hosts: Sequence[int] | None = None,
) -> ReshardPlan:
    """How `reshard` would move the tensor, without moving anything; it prints as a table.

    Args:
        hosts: the host of every rank; without it the hosts are found out, which is a collective of the whole world.
        others: as of `reshard`.

    Raises:
        ReshardError, UnknownStrategyError, UnknownAlgorithmError: as `reshard`.
    """
    request = _request(tensor, dst_mesh, dst_layout, strategy, algorithm)
    found = tuple(hosts) if hosts is not None else discover_hosts()
    if len(found) != dist.get_world_size():
        raise ReshardError(f"hosts names {len(found)} ranks: expected one host for each of {dist.get_world_size()}")
    return request.plan(found)


@dataclass(frozen=True, slots=True)
class _End:
    """A mesh, and how a tensor lies on it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{self.mesh.mesh.tolist()} {self.mesh.mesh_dim_names or ''} {list(self.placements)}"


@dataclass(frozen=True, slots=True)
class _Request:
    """What shall be moved where; hashable, and checked."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: _End
    destination: _End
    strategy: str
    algorithm: str

    @property
    def holds(self) -> bool:
        """Whether this rank has a piece to give."""
        return self.source.mesh.get_coordinate() is not None

    def facts(self) -> dict[str, str]:
        """What every rank must ask for alike, by name."""
        return {
            "the shape": str(self.shape),
            "the dtype": str(self.dtype),
            "the source": str(self.source),
            "the destination": str(self.destination),
            "the strategy": f"{self.strategy}, {self.algorithm}",
        }

    def tiles(self, end: _End) -> dict[int, Tile]:
        """What each rank holds at one end."""
        return tiles_of_placements(self.shape, end.mesh, end.placements)

    def plan(self, hosts: tuple[int, ...]) -> ReshardPlan:
        """The plan, made once."""
        return _plan(self, hosts)


@lru_cache(maxsize=256)
def _plan(request: _Request, hosts: tuple[int, ...]) -> ReshardPlan:
    ends = request.tiles(request.source), request.tiles(request.destination)
    return make_plan(*ends, request.dtype.itemsize, hosts, strategy=request.strategy, algorithm=request.algorithm)


def _open(request: _Request, timeout_s: float) -> tuple[Way, Tile | None]:
    """The route of a request, and what this rank needs of it."""
    # Routes belong to the world that they were opened in.
    return _routes(request, timeout_s, dist.group.WORLD)


@lru_cache(maxsize=64)
def _routes(request: _Request, timeout_s: float, world: dist.ProcessGroup) -> tuple[Way, Tile | None]:
    rank = dist.get_rank()
    held, needed = (request.tiles(end).get(rank) for end in (request.source, request.destination))
    name = f"a tensor of shape {request.shape} from {request.source} to {request.destination}"
    move = Move(request.plan(discover_hosts()), Side(name, rank, held, needed, request.dtype))
    buffers = Buffers(torch.device(request.destination.mesh.device_type))
    (route,) = open_routes(
        [move], buffers, _FIRST_TAG + TAG_KINDS * _routes.cache_info().misses, timedelta(seconds=timeout_s)
    )
    return route, needed


def _request(
    tensor: DTensor,
    mesh: DeviceMesh,
    layout: Sequence[Placement] | AxisSpec,
    strategy: str,
    algorithm: str,
) -> _Request:
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
    source = _End(tensor.device_mesh, tuple(tensor.placements))
    return _Request(shape, tensor.dtype, source, _End(mesh, _placements(layout, mesh, shape)), strategy, algorithm)


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
        if not (isinstance(placement, Replicate) or hasattr(placement, "dim")):
            raise ReshardError(f"dst_layout has {placement}: expected shards and replicas")
        dim = getattr(placement, "dim", 0)
        if dim and not -len(shape) <= dim < len(shape):
            raise ReshardError(f"dst_layout has {placement}, but the tensor has {len(shape)} dims")
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
