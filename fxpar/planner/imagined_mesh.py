"""Meshes of ranks that do not exist: one process can make the graphs of every rank, but nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from fxpar._torch.distributed import join_imagined_world
from fxpar.costs.placement import consecutive_hosts
from fxpar.errors import PlanningError
from fxpar.hardware.cluster import Cluster
from fxpar.ir.layout import AXES
from fxpar.world.mesh import Mesh, make_device_mesh

_DEVICE = "cpu"
"""Graphs have CPU tensors, so that planning for GPUs needs none. Their times are those of the cluster."""


@contextmanager
def imagined_world(num_ranks: int) -> Iterator[None]:
    """Within this context, the process is rank 0 of `num_ranks` on fake process groups.

    Raises:
        PlanningError: the process has joined a real process group.
    """
    if dist.is_initialized():
        raise PlanningError(
            "this process is one of a process group",
            "plan in a process of its own, before init_mesh, and load the plan",
        )
    join_imagined_world(num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def imagined_mesh(sizes: Mapping[str, int], cluster: Cluster) -> Mesh:
    """The mesh of all ranks of an imagined world on hosts of `cluster`, filled one after another; as rank 0 sees it."""
    pipe, data, z, y, x = (sizes.get(axis, 1) for axis in AXES)
    shape = Mesh(pipe, data, z, y, x, device_type=_DEVICE, cluster=cluster)
    hosts = consecutive_hosts(shape.num_ranks, cluster.ranks_per_host)
    return replace(shape, hosts=hosts, device_mesh=make_device_mesh(shape, _DEVICE))
