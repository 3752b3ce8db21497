"""Convert layouts to DTensor placements and back: DTensor is the type for optimizers and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor.placement_types import Placement as DPlacement

from fxpar._torch.distributed import StridedShard, wrap_pieces
from fxpar.ir.layout import AXES, Layout, Shard


def to_placements(layout: Layout, mesh_axes: Sequence[str]) -> list[DPlacement]:
    """DTensor placements of a layout without partial values, on a DeviceMesh with these axes.

    DTensor shards along one mesh axis after another. A shard that starts inside what is left of its dim becomes a
    strided shard; its `split_factor` is the product of the digits before it that no earlier axis holds.
    """
    placements: list[DPlacement] = []
    applied: list[Shard] = []
    for axis in mesh_axes:
        shard = layout.placement(axis)
        if not isinstance(shard, Shard):
            placements.append(DReplicate())
            continue
        leading = shard.outer // math.prod(
            other.parts for other in applied if other.dim == shard.dim and other.outer < shard.outer
        )
        placements.append(DShard(shard.dim) if leading == 1 else StridedShard(shard.dim, split_factor=leading))
        applied.append(shard)
    return placements


def is_expressible(layout: Layout, mesh_axes: Sequence[str]) -> bool:
    """Whether a DTensor on a DeviceMesh with these axes can express `layout`, and gathers its pieces correctly.

    DTensor reads strided shards as another order of the mesh's axes if all of them can be read so: if no dim has digits
    before or between those that axes hold. Otherwise it gathers along the last axis first, and computes a wrong size
    where an axis with a strided shard comes before another axis of the same dim.
    """
    placements = to_placements(layout, mesh_axes)
    by_dim: dict[int, list[Shard]] = {}
    for _, shard in layout.axes:
        if isinstance(shard, Shard):
            by_dim.setdefault(shard.dim, []).append(shard)
    if all(_leaves_no_gap(shards) for shards in by_dim.values()):
        return True
    after_strided: set[int] = set()
    for placement in placements:
        if isinstance(placement, DShard | StridedShard):
            if placement.dim in after_strided:
                return False
            if isinstance(placement, StridedShard):
                after_strided.add(placement.dim)
    return True


def _leaves_no_gap(shards: Sequence[Shard]) -> bool:
    """Whether the shards of one dim are its leading digits, in some order."""
    position = 1
    for shard in sorted(shards, key=lambda shard: shard.outer):
        if shard.outer != position:
            return False
        position *= shard.parts
    return True


def layout_of(tensor: DTensor) -> Layout:
    """The layout of a DTensor on a mesh whose axes have fxpar's names."""
    found: dict[str, Shard] = {}
    names = tensor.device_mesh.mesh_dim_names or ()
    for axis, placement in zip(names, tensor.placements, strict=True):
        if not isinstance(placement, DShard | StridedShard):
            continue
        parts = int(tensor.device_mesh.size(names.index(axis)))
        if parts == 1:
            continue
        leading = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        held = [shard for shard in found.values() if shard.dim == placement.dim]
        found[axis] = Shard(placement.dim, parts, _outer(leading, held))
    return Layout(tuple(tensor.shape), tuple((axis, found[axis]) for axis in AXES if axis in found))


def _outer(leading: int, held: Sequence[Shard]) -> int:
    """The `outer`, in the whole dim, of a digit that has `leading` values before it without the digits `held`."""
    outer = leading
    for shard in sorted(held, key=lambda shard: shard.outer):
        if shard.outer <= outer:
            outer *= shard.parts
    return outer


def from_local(local: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """The DTensor whose piece on this rank is `local`; no communication, no check. `mesh` has axes of fxpar's names."""
    placements = to_placements(layout, mesh.mesh_dim_names or ())
    return from_piece(local, mesh, placements, torch.Size(layout.shape), _stride(layout))


def from_locals(layout: Layout, mesh: DeviceMesh, dtype: torch.dtype) -> Callable[[Tensor], DTensor]:
    """Does what `from_local` does, faster, for many pieces of this layout and dtype; this rank is part of `mesh`."""
    placements = to_placements(layout, mesh.mesh_dim_names or ())
    return wrap_pieces(mesh, placements, torch.Size(layout.shape), _stride(layout), dtype)


def _stride(layout: Layout) -> tuple[int, ...]:
    return torch.empty(layout.shape, device="meta").stride()


def from_piece(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[DPlacement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The DTensor of that global `shape` and `stride` whose piece on this rank is `local`.

    On a rank outside of `mesh`, only the dtype and the device of `local` matter. No communication, no check.
    """
    if not shape:  # torch takes an empty shape for none, and then computes it from the piece
        local = local if local.dim() == 0 else local.new_empty(())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
