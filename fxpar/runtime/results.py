"""Put the microbatches of a result together, as a DTensor on the last stage's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxpar._torch import device_mesh_without_groups
from fxpar.dtensor import to_placements
from fxpar.layout import Layout
from fxpar.mesh import STAGE_AXES, Mesh, num_batch_shards


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """A result of the forward: its layout for one microbatch, its dtype, and whether its dim 0 is the batch."""

    layout: Layout
    dtype: torch.dtype
    batched: bool


def gather_result(pieces: Sequence[Tensor] | None, spec: ResultSpec, mesh: Mesh, microbatches: int) -> DTensor:
    """The result of a step, from this rank's pieces, one per microbatch; None on the ranks of other stages.

    With a batch dim, the microbatches and batch shards stand one after another along it. A floating-point scalar is
    the mean over both; any other result without a batch dim is the last microbatch's.
    """
    shape = list(spec.layout.shape)
    placements = to_placements(spec.layout, STAGE_AXES)
    if spec.batched:
        shape[0] *= microbatches * num_batch_shards(mesh)
        for axis in mesh.batch_axes:
            placements[STAGE_AXES.index(axis)] = Shard(0) if mesh.sizes[axis] > 1 else Replicate()
    local = torch.empty(0, dtype=spec.dtype, device=mesh.device_type) if pieces is None else _join(pieces, spec, mesh)
    return DTensor.from_local(
        local,
        _last_stage(mesh),
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def _join(pieces: Sequence[Tensor], spec: ResultSpec, mesh: Mesh) -> Tensor:
    if spec.batched:
        return torch.cat(list(pieces))
    if spec.layout.shape or not spec.dtype.is_floating_point:
        return pieces[-1]
    mean = torch.stack(list(pieces)).mean()
    for axis in mesh.batch_axes:
        if mesh.sizes[axis] > 1:
            dist.all_reduce(mean, group=mesh.group(axis))
            mean /= mesh.sizes[axis]
    return mean


def _last_stage(mesh: Mesh) -> DeviceMesh:
    """The last stage's ranks; a rank of another stage only knows them, and has no groups with them."""
    if mesh.coordinate["pipe"] == mesh.pipe - 1:
        return mesh.stage_mesh
    assert mesh.device_mesh is not None, "the mesh was made without processes"
    return device_mesh_without_groups(mesh.device_type, mesh.device_mesh.mesh[-1], STAGE_AXES)
