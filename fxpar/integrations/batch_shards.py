"""What a loop that knows processes alone needs of batch shards: their ranks, and their rows of results."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fxpar.world.mesh import Mesh


def first_ranks(mesh: Mesh) -> list[int]:
    """The first rank of each batch shard, in the order of the shards."""
    return [rank for rank in range(mesh.num_ranks) if _is_first_of_shard(mesh, rank)]


def _is_first_of_shard(mesh: Mesh, rank: int) -> bool:
    coordinate = mesh.coordinate_of(rank)
    return not any(index for axis, index in coordinate.items() if axis not in mesh.batch_axes)


def rows_of_shard(result: DTensor, mesh: Mesh) -> Tensor:
    """Those rows of a result on all stages (the option `results="all"`) that this rank's batch shard has."""
    axes = zip(result.device_mesh.mesh_dim_names or (), result.placements, strict=True)
    placements = [placement if axis in mesh.batch_axes else Replicate() for axis, placement in axes]
    return result.redistribute(placements=placements).to_local()
