"""Resharding of DTensors between any two meshes of one world: `fxpar.reshard` and `fxpar.plan_reshard`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fxpar.errors import ReshardError
from fxpar.hardware.cluster import default_cluster
from fxpar.hardware.network import Network
from fxpar.ir.dtensor import from_piece
from fxpar.resharding.plan import ReshardPlan
from fxpar.resharding.request import AxisSpec, Request, ReshardOptions, make_request
from fxpar.resharding.tile import Tile
from fxpar.transport.buffers import Buffers
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.route import Route
from fxpar.transport.route_messages import TAG_KINDS
from fxpar.transport.routes import RouteSpec, open_routes
from fxpar.world.agreement import check_agreement
from fxpar.world.hosts import discover_hosts

_FIRST_TAG = 1 << 24
"""Lower tags are those of compiled steps."""


def reshard(
    tensor: DTensor,
    dst_mesh: DeviceMesh,
    dst_layout: Sequence[Placement] | AxisSpec,
    *,
    strategy: str = "broadcast",
    algorithm: str = "best",
    network: Network | None = None,
    timeout_s: float = 300.0,
) -> DTensor:
    """The same tensor on another mesh, in another layout, or both.

    A collective of the whole world: every rank calls it, even if it is in only one of the meshes or in neither. The
    result has no autograd history.

    Args:
        tensor: on a mesh of this world, without partial values.
        dst_mesh: a mesh of this world; it may share ranks with the tensor's mesh.
        dst_layout: one placement per mesh axis, or for every tensor dim the axis (or axes) that shard it, or None.
        strategy: `broadcast`, `send_recv`, `local_allgather` or `global_allgather` (Zhuang et al., section 3.1).
        algorithm: chooses senders and order: `best`, `greedy`, `depth_first`, `balance` or `naive`.
        network: rate and latency of a host's interface, which determine the chunk size; by default, typical values for
            the mesh's type of device.
        timeout_s: how long one message may take.

    Raises:
        ReshardError: a mesh or a layout does not fit; nothing was sent.
        PlanMismatchError: the ranks disagree about the tensor or its destination; nothing was sent.
        UnknownStrategyError, UnknownAlgorithmError: no such name.
        PeerLostError: a rank died, or took too long.
    """
    how = _options(dst_mesh, strategy, algorithm, network, timeout_s)
    request = make_request(tensor, dst_mesh, dst_layout, how)
    check_agreement(request.facts())
    route, needed = _open(request)
    piece = torch.empty(needed.shape if needed else 0, dtype=tensor.dtype, device=tensor.device)
    if request.holds:
        shipment, receipt = route.exchange(tensor.to_local().detach(), piece, 0)
        route.wait(receipt)
        route.complete(shipment)
    else:
        route.wait(route.post_receive(piece, 0))
    route.finish()
    return from_piece(piece, dst_mesh, request.destination.placements, tensor.shape, tensor.stride())


def plan_reshard(
    tensor: DTensor,
    dst_mesh: DeviceMesh,
    dst_layout: Sequence[Placement] | AxisSpec,
    *,
    strategy: str = "broadcast",
    algorithm: str = "best",
    network: Network | None = None,
    hosts: Sequence[int] | None = None,
) -> ReshardPlan:
    """The plan by which `reshard` would move the tensor; nothing is sent. It prints as a table.

    Args:
        hosts: the host of every rank; by default the hosts are discovered, which is a collective of the whole world.
        others: see `reshard`.

    Raises:
        ReshardError, UnknownStrategyError, UnknownAlgorithmError: as `reshard`.
    """
    request = make_request(tensor, dst_mesh, dst_layout, _options(dst_mesh, strategy, algorithm, network))
    found = tuple(hosts) if hosts is not None else discover_hosts()
    if len(found) != dist.get_world_size():
        raise ReshardError(f"hosts names {len(found)} ranks: expected one host for each of {dist.get_world_size()}")
    return request.plan(found)


def _options(
    mesh: DeviceMesh, strategy: str, algorithm: str, network: Network | None, timeout_s: float = math.inf
) -> ReshardOptions:
    return ReshardOptions(strategy, algorithm, network or default_cluster(mesh.device_type).network, timeout_s)


def _open(request: Request) -> tuple[Route, Tile | None]:
    """The route of a request, and the tile that this rank receives."""
    assert dist.group.WORLD is not None, "the default process group must exist"
    return _routes.setdefault(dist.group.WORLD, _Routes()).open(request)


class _Routes:
    """A cache of the routes that were opened last in one world; they are dropped with it."""

    def __init__(self) -> None:
        self._num_opened = 0
        self.open = lru_cache(maxsize=64)(self._open)

    def _open(self, request: Request) -> tuple[Route, Tile | None]:
        rank = dist.get_rank()
        held, needed = (request.tiles(end).get(rank) for end in (request.source, request.destination))
        name = f"a tensor of shape {request.shape} from {request.source} to {request.destination}"
        move = RouteSpec(request.plan(discover_hosts()), Endpoint(name, rank, held, needed, request.dtype))
        buffers = Buffers(torch.device(request.destination.mesh.device_type))
        tag = _FIRST_TAG + TAG_KINDS * self._num_opened
        self._num_opened += 1
        (route,) = open_routes([move], buffers, tag, timedelta(seconds=request.how.timeout_s))
        return route, needed


_routes: WeakKeyDictionary[dist.ProcessGroup, _Routes] = WeakKeyDictionary()
"""By default process group."""
