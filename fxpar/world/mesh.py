"""The mesh: the coordinates of ranks on the axes pipe, data, z, y and x."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpar._torch.distributed import HashStore
from fxpar.environment import CUDA_DEFAULT_QUEUES, hardware_queues
from fxpar.errors import InvalidMeshError, MeshSizeError, TooFewQueuesError
from fxpar.errors.base import one_of
from fxpar.hardware.cluster import Cluster, read_cluster
from fxpar.ir.layout import AXES
from fxpar.world.gloo_threads import rest_before_exit
from fxpar.world.hosts import discover_hosts
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.peer_connections import open_connections
from fxpar.world.peer_watch import peer_watch, watch_peers

STAGE_AXES = ("data", "y", "x", "z")
"""Axes of a stage's parameter mesh. z comes last, so that an all-gather over it concatenates contiguous pieces."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the five axes, this process's rank, and the host of every rank (default: all are on one).

    x varies fastest with the rank, then y, z, data and pipe. `cluster` has the rates and latencies of the machines, if
    they are known.

    Raises:
        InvalidMeshError: a size is not a positive integer, or the number of hosts is not that of ranks.
    """

    pipe: int = 1
    data: int = 1
    z: int = 1
    y: int = 1
    x: int = 1
    rank: int = 0
    device_type: str = "cpu"
    device_mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    hosts: tuple[int, ...] = ()
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise InvalidMeshError(f"mesh axis {axis!r} has size {size!r}: expected a positive integer")
        if not self.hosts:
            object.__setattr__(self, "hosts", (0,) * self.num_ranks)
        if len(self.hosts) != self.num_ranks:
            raise InvalidMeshError(
                f"{len(self.hosts)} hosts are given for a mesh of {self.num_ranks} ranks: expected one for each rank"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_ranks(self) -> int:
        """How many processes the mesh has."""
        return math.prod(self.sizes.values())

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Axis -> index of `rank`."""
        coordinate = {}
        for axis, size in reversed(self.sizes.items()):
            rank, coordinate[axis] = divmod(rank, size)
        return coordinate

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis -> index of this process."""
        return self.coordinate_of(self.rank)

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """The rank at `coordinate`; axes left out count as 0."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + coordinate.get(axis, 0)
        return rank

    def stage_coordinates(self, pipe: int) -> Iterator[dict[str, int]]:
        """Every coordinate of the ranks at index `pipe` of the pipe axis, in rank order."""
        sizes = [range(size) for axis, size in self.sizes.items() if axis != "pipe"]
        for index in product(*sizes):
            yield dict(zip(AXES, (pipe, *index), strict=True))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return ("data", "z")

    def batch_shard(self, coordinate: Mapping[str, int]) -> int:
        """The index of the batch shard that the rank at `coordinate` has; z varies fastest."""
        place = 0
        for axis in self.batch_axes:
            place = place * self.sizes[axis] + coordinate[axis]
        return place

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along `axis`."""
        assert self.device_mesh is not None, "the mesh was made without processes"
        return self.device_mesh.get_group(axis)

    @property
    def moves_in_groups(self) -> bool:
        """Whether stages exchange values by collectives in process groups, as over NCCL.

        Otherwise they use gloo's messages between hosts, and shared memory within a host.
        """
        if dist.is_initialized() and dist.get_backend() != "fake":
            return moves_in_groups(self.device_type)
        # Nothing is sent, only planned: the type of device is the cluster's, if there is one.
        return (self.device_type if self.cluster is None else self.cluster.device_type) != "cpu"

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes of `stage_mesh`: those of `STAGE_AXES` with several ranks, since each axis costs DTensor time."""
        return tuple(axis for axis in STAGE_AXES if self.sizes[axis] > 1) or STAGE_AXES[:1]

    @property
    def stage_mesh(self) -> DeviceMesh:
        """The DeviceMesh (`stage_axes`) of the ranks that share this rank's stage."""
        assert self.device_mesh is not None, "the mesh was made without processes"
        return self.device_mesh[self.stage_axes]

    def __str__(self) -> str:
        return " × ".join(f"{axis}={size}" for axis, size in self.sizes.items())


def sizes_text(sizes: Mapping[str, int], separator: str = " × ") -> str:
    """The axes of several ranks, for people; separated by blanks, it is what `mesh_sizes` reads."""
    return separator.join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"


def mesh_sizes(given: Mapping[str, int] | str) -> dict[str, int]:
    """The sizes of all axes, from those of some: a mapping, or text such as "pipe=2 x=4", as meshes print.

    Raises:
        InvalidMeshError: it is no such text, names an unknown axis or one twice, or a size is no positive integer.
    """
    sizes = _sizes_in(given) if isinstance(given, str) else dict(given)
    for axis in sizes:
        if axis not in AXES:
            raise InvalidMeshError(f"mesh {given!r} has an axis {axis!r}: {one_of(AXES, axis)}")
    pipe, data, z, y, x = (sizes.get(axis, 1) for axis in AXES)
    return Mesh(pipe, data, z, y, x).sizes


def _sizes_in(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        if part in ("x", "×"):  # between two axes
            continue
        axis, equals, size = part.partition("=")
        if not equals or not size.isdecimal() or axis in sizes:
            raise InvalidMeshError(f"mesh {text!r}: expected each axis once with its size, as in 'pipe=2 x=4'")
        sizes[axis] = int(size)
    return sizes


def init_mesh(
    pipe: int = 1,
    data: int = 1,
    z: int = 1,
    y: int = 1,
    x: int = 1,
    *,
    device_type: str | None = None,
    cluster: Cluster | str | Path | None = None,
) -> Mesh:
    """Arrange all processes in a mesh, where x varies fastest with the rank, then y, z, data and pipe. A collective.

    The product of the sizes is the number of processes. Works under torchrun, after your own
    `torch.distributed.init_process_group` under any other launcher, and in a single process without either.

    Args:
        pipe: size of the axis of pipeline parallelism: each stage is on the ranks of one index of it.
        data: size of the axis of data parallelism: it splits the batch, and parameters are replicated over it.
        z: size of the axis of sharded data parallelism: it splits the batch, too, and parameters, gradients and
            optimizer states are stored in shards over it.
        y: size of the second axis of tensor parallelism: with x, weights are sharded in two dims.
        x: size of the first axis of tensor parallelism: weights and activations are sharded over it.
        device_type: "cpu" or "cuda" (default: "cuda" where it is available).
        cluster: rates and latencies of the machines, by which layouts and stages are chosen: a `fxpar.Cluster`, a JSON
            file that `fxpar calibrate` wrote, or the name of a published one, such as "dgx-a100" (default: a published
            one with GPUs of the same name, else "dgx-a100"; "laptop" on a CPU).

    Raises:
        InvalidMeshError: a size is not a positive integer.
        UnknownClusterError, InvalidClusterError: there is no such cluster, or its file is wrong.
        MeshSizeError: the product of the sizes is not the number of processes.
        TooFewQueuesError: CUDA_DEVICE_MAX_CONNECTIONS is too small for a pipeline over NCCL.
    """
    shape = Mesh(pipe, data, z, y, x)
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    known = None if cluster is None else read_cluster(cluster)
    if device_type == "cuda" and pipe > 1 and (found := hardware_queues()) < CUDA_DEFAULT_QUEUES:
        raise TooFewQueuesError(found, CUDA_DEFAULT_QUEUES)
    _init_process_group(device_type)
    rest_before_exit()
    if shape.num_ranks != dist.get_world_size():
        raise MeshSizeError(str(shape), shape.num_ranks, dist.get_world_size())
    device_mesh = make_device_mesh(shape, device_type)
    if moves_in_groups(device_type):
        _connect_axes(device_mesh)
        if shape.num_ranks > 1 and peer_watch() is None:
            watch_peers(open_connections())
    with naming_lost_peers("the hosts of all ranks"):
        hosts = discover_hosts()
    mesh = Mesh(pipe, data, z, y, x, dist.get_rank(), device_type, device_mesh, hosts, known)
    _latest[:] = [mesh]
    return mesh


_latest: list[Mesh] = []
"""The mesh of the latest call of `init_mesh`; empty before the first."""


def mesh_of_this_world() -> Mesh | None:
    """The mesh of the latest call of `init_mesh`, if it fits the current world."""
    for mesh in _latest:
        if dist.is_initialized() and dist.get_world_size() == mesh.num_ranks:
            return mesh
    return None


def make_device_mesh(shape: Mesh, device_type: str) -> DeviceMesh:
    """The DeviceMesh of `shape`, with process groups along its axes. A collective."""
    ranks = torch.arange(shape.num_ranks, device="cpu").view(*shape.sizes.values()).permute(0, 1, 3, 4, 2)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("pipe", *STAGE_AXES))


def _connect_axes(device_mesh: DeviceMesh) -> None:
    """Run the first collective of each axis' group: over NCCL, it blocks the CPU until all members have called it."""
    for group in device_mesh.get_all_groups():
        probe = torch.zeros(1, device=device_mesh.device_type)
        dist.all_reduce(probe, group=group)
        probe.cpu()  # waits for the device


def _init_process_group(device_type: str) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if device_type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        if device_type == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def moves_in_groups(device_type: str) -> bool:
    """`Mesh.moves_in_groups` for values on devices of this type, by the backend of the current world."""
    backends = dict(backend.split(":") for backend in dist.get_backend_config().split(","))
    return backends.get(device_type) not in ("gloo", "fake")


def num_batch_shards(mesh: Mesh) -> int:
    """The number of batch shards: `num_replicas` of a DistributedSampler."""
    return math.prod(mesh.sizes[axis] for axis in mesh.batch_axes)


def batch_rank(mesh: Mesh) -> int:
    """The index of the batch shard that this process reads: `rank` of a DistributedSampler."""
    return mesh.batch_shard(mesh.coordinate)
