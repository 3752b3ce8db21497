"""What ranks do on emulated hosts; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

import os
import socket
import time
from fcntl import ioctl
from struct import pack

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.bench.hosts.emulated_cluster import DEVICE, EmulatedCluster


def own_address() -> tuple[int, str]:
    """This process's rank, and the address of its device."""
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = ioctl(any_socket, siocgifaddr, pack("256s", DEVICE.encode()))
    return dist.get_rank(), socket.inet_ntoa(found[20:24])


def own_priority() -> tuple[int, bool]:
    """How nice this process is to others, and whether it may be less so."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.nice(-1)
    except PermissionError:
        return niceness, False
    return niceness, True


def exchange(num_bytes: int) -> list[Tensor]:
    """Each rank sends its own value to every other; returns what this one received, in order of the senders."""
    own = dist.get_rank()
    others = [rank for rank in range(dist.get_world_size()) if rank != own]
    received = [torch.empty(num_bytes, dtype=torch.uint8) for _ in others]
    works = [dist.irecv(value, rank) for value, rank in zip(received, others, strict=True)]
    works += [dist.isend(value_of(own, num_bytes), rank) for rank in others]
    for work in works:
        assert work is not None
        work.wait()
    return received


def value_of(rank: int, num_bytes: int) -> Tensor:
    """What `rank` sends to the others."""
    return torch.arange(num_bytes).add(rank).to(torch.uint8)


def time_to_send(receiver: int, num_bytes: int) -> float:
    """Rank 0 sends to `receiver`, some times; the least seconds that this took of the receiver, and 0 elsewhere."""
    value = torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(value, receiver)
        elif dist.get_rank() == receiver:
            dist.recv(value, 0)
            seconds.append(time.perf_counter() - start)
    return min(seconds, default=0.0)


def make_cluster_as_nobody() -> str:
    """What is missing for a process of an ordinary user."""
    if os.geteuid() == 0:
        os.setuid(65534)
    return EmulatedCluster.missing() or "nothing"


def hold_cluster() -> None:
    """Never ends: a cluster with a rank on each host. Prints where its networks are, then that all ranks are there."""
    with EmulatedCluster(2) as cluster:
        assert cluster.switch is not None
        print(*(network.path for network in (cluster.switch, *cluster.hosts)), flush=True)
        cluster.run(1, _hold)


def _hold() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        print("all are there", flush=True)
    while True:
        dist.barrier()
