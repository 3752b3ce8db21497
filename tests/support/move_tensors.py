"""What ranks do to reshard DTensors; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import fxpar
from fxpar._torch.distributed import StridedShard, device_mesh_without_groups
from fxpar.errors import FxparError
from fxpar.reshard_tensor import _open, _options
from fxpar.resharding.request import make_request
from fxpar.resharding.search import ALGORITHMS
from fxpar.resharding.strategies import STRATEGIES
from fxpar.resharding.tile import tiles_of_placements
from fxpar.transport.relay_route import RelayRoute
from fxpar.world.agreement import check_agreement
from tests.resharding.pieces import taken

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Case:
    """A tensor on one mesh, and where it shall be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: DeviceMesh
    source_placements: tuple[Placement, ...]
    destination: DeviceMesh
    destination_placements: tuple[Placement, ...]


def live_on(host: int) -> None:
    """Give this rank a host: ranks of different ones do not use each other's memory."""
    os.environ["FXPAR_HOST"] = f"host {host}"


def random_case(generator: random.Random, device_type: str) -> Case:
    """Meshes apart, overlapping or the same; uneven and empty shards, several axes in one dim, tensors without dims."""
    shape = tuple(generator.choice([0, 1, 2, 3, 5, 8, 12]) for _ in range(generator.randint(0, 3)))
    meshes = [_random_mesh(generator, device_type) for _ in range(2)]
    placements = [tuple(_random_placement(generator, shape) for _ in range(mesh.ndim)) for mesh in meshes]
    return Case(shape, generator.choice(DTYPES), meshes[0], placements[0], meshes[1], placements[1])


def _random_mesh(generator: random.Random, device_type: str) -> DeviceMesh:
    sizes = generator.choice([(1,), (2,), (3,), (5,), (2, 2), (1, 3), (2, 3), (4, 2)])
    ranks = generator.sample(range(dist.get_world_size()), torch.Size(sizes).numel())
    return device_mesh_without_groups(device_type, torch.tensor(ranks).view(sizes), ("y", "x")[-len(sizes) :])


def _random_placement(generator: random.Random, shape: tuple[int, ...]) -> Placement:
    if not shape:
        return Replicate()
    dim = generator.randrange(len(shape))
    return generator.choice([Replicate(), Shard(dim), Shard(dim), StridedShard(dim, split_factor=2)])


def reshard_at_random(seed: int, count: int, ranks_per_host: int, device_type: str = "cpu") -> int:
    """Reshard `count` random tensors by every strategy, each by some algorithm, and check this rank's pieces.

    Returns how many of these were not empty.
    """
    live_on(dist.get_rank() // ranks_per_host)
    generator = random.Random(seed)
    num_checked = 0
    for number in range(count):
        case = random_case(generator, device_type)
        torch.manual_seed(number)
        whole = torch.randint(0, 100, case.shape).to(device_type, case.dtype)
        ends = ((case.source, case.source_placements), (case.destination, case.destination_placements))
        held, needed = (tiles_of_placements(case.shape, *end).get(dist.get_rank()) for end in ends)
        local = whole.new_empty(0 if case.shape else ()) if held is None else taken(whole, held)
        tensor = DTensor.from_local(
            local, *ends[0], run_check=False, shape=torch.Size(case.shape), stride=whole.stride()
        )
        # Where the network is slow, transfers are cut into chunks, and the ranks of a host take turns.
        network = generator.choice([None, fxpar.Network(bytes_per_us=1e-4, chunk_us=1e4)])
        for strategy in STRATEGIES:
            how = {"strategy": strategy, "algorithm": generator.choice(ALGORITHMS), "network": network}
            moved = fxpar.reshard(tensor, *ends[1], **how, timeout_s=30)
            assert moved.shape == whole.shape and moved.dtype == whole.dtype and moved.placements == ends[1][1]
            if needed is not None:
                assert torch.equal(moved.to_local(), taken(whole, needed)), f"{case}, {how}"
                num_checked += moved.to_local().numel() > 0
    return num_checked


def gather_by_rings(times: int) -> None:
    """Each of three ranks sends its shard to the others, and passes on to each what comes from the other one."""
    rank = dist.get_rank()
    live_on(rank)
    mesh = device_mesh_without_groups("cpu", torch.arange(3), ("x",))
    for number in range(times):
        whole = torch.arange(35.0).view(5, 7) + 100 * number
        held = tiles_of_placements((5, 7), mesh, [Shard(1)])[rank]
        tensor = DTensor.from_local(
            taken(whole, held), mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        moved = fxpar.reshard(tensor, mesh, [Replicate()], strategy="global_allgather", timeout_s=30)
        assert torch.equal(moved.to_local(), whole), f"time {number}: {moved.to_local()}"


def move_other_things() -> str:
    """Each rank would reshard another tensor; returns its error."""
    mesh = device_mesh_without_groups("cpu", torch.arange(2), ("x",))
    dtype = (torch.float32, torch.float64)[dist.get_rank()]
    tensor = DTensor.from_local(torch.zeros(2 + dist.get_rank(), dtype=dtype), mesh, [Replicate()], run_check=False)
    try:
        fxpar.reshard(tensor, mesh, [Shard(0)])
    except FxparError as error:
        return str(error)
    return "moved"


def lose_a_rank(hosts: tuple[int, ...]) -> tuple[str, float]:
    """Rank 1 is killed while a tensor is on its way from rank 0 to it and rank 2; the error, and how long it took."""
    rank = dist.get_rank()
    live_on(hosts[rank])
    ends = (device_mesh_without_groups("cpu", torch.tensor(ranks), ("x",)) for ranks in ([0], [1, 2]))
    source, destination = ends
    whole = torch.ones(1 << 25, dtype=torch.uint8)
    tensor = DTensor.from_local(
        whole if rank == 0 else whole[:0], source, [Replicate()], run_check=False, shape=whole.shape, stride=(1,)
    )
    begin = time.monotonic()
    if rank == 1:
        _die_in_the_midst(tensor, destination)
    try:
        fxpar.reshard(tensor, destination, [Replicate()], timeout_s=20)
    except FxparError as error:
        return str(error), time.monotonic() - begin
    return "moved", time.monotonic() - begin


def _die_in_the_midst(tensor: DTensor, destination: DeviceMesh) -> None:
    """Take part like every rank until the first byte has come; as a reader, until it has asked."""
    request = make_request(tensor, destination, [Replicate()], _options(destination, "broadcast", "best", None, 20))
    check_agreement(request.facts())
    route, needed = _open(request)
    assert needed is not None
    piece = torch.zeros(needed.shape, dtype=tensor.dtype)

    def die_at_the_first_byte() -> None:
        while piece[0] == 0:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert isinstance(route, RelayRoute)
    if route._receiver._passes_on:
        # Before the thread passes anything on: else it might be done by then.
        route._receiver._worker.submit(die_at_the_first_byte)
        route.post_receive(piece, 0)
        signal.pause()
    route.post_receive(piece, 0)
    os.kill(os.getpid(), signal.SIGKILL)
