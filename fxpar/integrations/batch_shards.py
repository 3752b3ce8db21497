"""What a loop that knows processes alone needs of batch shards: their ranks."""

from __future__ import annotations

from fxpar.world.mesh import Mesh


def first_ranks(mesh: Mesh) -> list[int]:
    """The first rank of each batch shard, in the order of the shards."""
    return [rank for rank in range(mesh.num_ranks) if _is_first_of_shard(mesh, rank)]


def _is_first_of_shard(mesh: Mesh, rank: int) -> bool:
    coordinate = mesh.coordinate_of(rank)
    return not any(index for axis, index in coordinate.items() if axis not in mesh.batch_axes)
