"""Layouts as DTensor placements and back: DTensor is the type at the edges, for optimizers and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor.placement_types import Placement as DPlacement

from fxpar._torch import StridedShard
from fxpar.layout import AXES, Layout, Shard


def to_placements(layout: Layout, mesh_axes: Sequence[str]) -> list[DPlacement]:
    """DTensor placements of a layout without partial values, on a DeviceMesh with these axes.

    A shard that starts inside its dim becomes a strided shard, whose `split_factor` counts the leading values.
    """
    placements: list[DPlacement] = []
    parts_so_far: dict[int, int] = {}
    for axis in mesh_axes:
        placement = layout.placement(axis)
        if not isinstance(placement, Shard):
            placements.append(DReplicate())
            continue
        leading = placement.outer // parts_so_far.get(placement.dim, 1)
        placements.append(DShard(placement.dim) if leading == 1 else StridedShard(placement.dim, split_factor=leading))
        parts_so_far[placement.dim] = parts_so_far.get(placement.dim, 1) * placement.parts
    return placements


def layout_of(tensor: DTensor) -> Layout:
    """The layout of a DTensor on a mesh whose axes have fxpar's names."""
    found: dict[str, Shard] = {}
    parts_so_far: dict[int, int] = {}
    names = tensor.device_mesh.mesh_dim_names or ()
    for axis, placement in zip(names, tensor.placements, strict=True):
        if not isinstance(placement, DShard | StridedShard):
            continue
        parts = int(tensor.device_mesh.size(names.index(axis)))
        if parts == 1:
            continue
        before = parts_so_far.get(placement.dim, 1)
        leading = placement.split_factor if isinstance(placement, StridedShard) else 1
        found[axis] = Shard(placement.dim, parts, before * int(leading))
        parts_so_far[placement.dim] = before * parts
    return Layout(tuple(tensor.shape), tuple((axis, found[axis]) for axis in AXES if axis in found))


def from_local(local: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """The DTensor whose piece on this rank is `local`; no communication, no check."""
    stride = torch.empty(layout.shape, device="meta").stride()
    placements = to_placements(layout, mesh.mesh_dim_names or ())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=stride)
