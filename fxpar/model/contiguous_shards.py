"""Convert DTensors to the contiguous shards of checkpoints, and back to the placements of this rank's parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as DShard

from fxpar._torch.distributed import StridedShard
from fxpar.ir.dtensor import from_local, layout_of
from fxpar.ir.tiles import shard_of
from fxpar.world.mesh import Mesh


def contiguous(tensor: DTensor) -> DTensor:
    """`tensor`, or a copy in contiguous shards if its shards start inside a dim (q, k and v in one weight).

    `torch.distributed.checkpoint` refuses such shards. A collective of the ranks of the tensor's mesh.
    """
    if not any(isinstance(placement, StridedShard) for placement in tensor.placements):
        return tensor
    placements = [DShard(p.dim) if isinstance(p, StridedShard) else p for p in tensor.placements]
    return distribute_tensor(tensor.full_tensor().detach(), tensor.device_mesh, placements, src_data_rank=None)


def placed_like(given: Tensor, held: DTensor, mesh: Mesh) -> DTensor:
    """`given` with the placements of `held`, in its own dtype; it is a whole tensor or a DTensor of the same shape.

    If `given` is a DTensor with other placements, this is a collective of the ranks of its mesh.
    """
    if isinstance(given, DTensor):
        if given.placements == held.placements and given.device_mesh == held.device_mesh:
            return given
        given = given.full_tensor()
    layout = layout_of(held)
    local = shard_of(given.detach(), layout, mesh.coordinate).to(held.to_local().device)
    return from_local(local.clone(memory_format=torch.contiguous_format), layout, held.device_mesh)
