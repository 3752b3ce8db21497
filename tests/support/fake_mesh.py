"""A mesh over a fake process group: one process can build the graphs of every rank, but sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar.world.mesh import Mesh, init_mesh


@contextmanager
def fake_mesh(**sizes: int) -> Iterator[Mesh]:
    """The mesh of the given axis sizes, as rank 0 sees it."""
    num_ranks = Mesh(**sizes).num_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield init_mesh(**sizes)
    finally:
        dist.destroy_process_group()


def as_rank(mesh: Mesh, rank: int) -> Mesh:
    """`mesh` as another rank sees it, but for its process groups."""
    return replace(mesh, rank=rank)
