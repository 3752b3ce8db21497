"""DTensors as checkpoints hold them, in contiguous shards, and back as this rank holds its parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as DShard

from fxpar._torch import StridedShard
from fxpar.ir.dtensor import from_local, layout_of
from fxpar.ir.tiles import shard_of
from fxpar.world.mesh import Mesh


def contiguous(tensor: DTensor) -> DTensor:
    """`tensor`, or, where shards start inside a dim (q, k and v in one weight), a copy of it in contiguous shards.

    `torch.distributed.checkpoint` refuses the former. A collective of the ranks of the tensor's mesh.
    """
    if not any(isinstance(placement, StridedShard) for placement in tensor.placements):
        return tensor
    placements = [DShard(p.dim) if isinstance(p, StridedShard) else p for p in tensor.placements]
    return distribute_tensor(tensor.full_tensor().detach(), tensor.device_mesh, placements, src_data_rank=None)


def placed_like(given: Tensor, held: DTensor, mesh: Mesh) -> DTensor:
    """`given`, a whole tensor or a DTensor of the shape of `held`, in its own dtype and the placements of `held`.

    A collective of the ranks of the mesh of `given` where that is a DTensor with other placements.
    """
    if isinstance(given, DTensor):
        if given.placements == held.placements and given.device_mesh == held.device_mesh:
            return given
        given = given.full_tensor()
    layout = layout_of(held)
    local = shard_of(given.detach(), layout, mesh.coordinate).to(held.to_local().device)
    return from_local(local.clone(memory_format=torch.contiguous_format), layout, held.device_mesh)
