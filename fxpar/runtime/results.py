"""Join the microbatches of a result to a DTensor on the last stage's ranks, or on those of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxpar._torch.distributed import device_mesh_without_groups
from fxpar.ir.capture import Capture, example
from fxpar.ir.dtensor import from_local
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import Port, PortKind, StageBorder
from fxpar.runtime.remote_result import RemoteResult
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import Mesh, num_batch_shards


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """A result of the forward: its layout for one microbatch, its dtype, and whether its dim 0 is the batch.

    `requires_grad` is that of the result in the single-device model. `name` is for messages.
    """

    layout: Layout
    dtype: torch.dtype
    batched: bool
    requires_grad: bool = False
    name: str = "the result"


def result_specs(capture: Capture, border: StageBorder) -> list[ResultSpec]:
    """The specs of the forward's results, in order; `border` is the last stage's."""
    specs = []
    for position, node in enumerate(capture.results):
        layout = border.outputs[Port(PortKind.RESULT, str(position))]
        batched = len(layout.shape) > 0 and layout.shape[0] == capture.microbatch_size
        value = example(node)
        name = f"result {position} of the forward ({value.dtype}, shape {tuple(value.shape)} for each microbatch)"
        specs.append(ResultSpec(layout, value.dtype, batched, value.requires_grad, name))
    return specs


def gather_result(
    pieces: Sequence[Tensor] | None,
    spec: ResultSpec,
    mesh: Mesh,
    microbatches: int,
    pipe: int,
    *,
    on_all_stages: bool = False,
) -> DTensor:
    """The result of a step as a DTensor.

    A result with a batch dim is concatenated along it, over microbatches and batch shards. A floating-point scalar is
    averaged over both. Any other result without a batch dim is that of the last microbatch.

    Args:
        pieces: this rank's pieces, one per microbatch; None on the ranks of other stages.
        pipe: the coordinate of the result's stage on the pipe axis.
        on_all_stages: whether it is broadcast over the pipe axis, so that every rank gets a DTensor on the mesh of its
            own stage. Otherwise it is a DTensor on the ranks of its stage, and a RemoteResult on all others.

    Raises:
        PeerLostError: another rank died.
    """
    layout = spec.layout
    if spec.batched and layout.is_ragged(0):  # pieces of microbatches would not make up a piece of the whole batch
        pieces = pieces and [from_local(piece, layout, mesh.stage_mesh).full_tensor() for piece in pieces]
        layout = Layout(layout.shape)
    if spec.batched:
        layout = _stacked(layout, mesh, microbatches * num_batch_shards(mesh))
    local = torch.empty(0, dtype=spec.dtype, device=mesh.device_type) if pieces is None else _join(pieces, spec, mesh)
    if on_all_stages and mesh.pipe > 1:
        local = _broadcast(local, layout.local_shape(mesh.coordinate), pipe, spec.name, mesh)
        return from_local(local, layout, mesh.stage_mesh)
    result = from_local(local, layout, _mesh_at(pipe, mesh))
    return RemoteResult.of(result, spec.name) if pieces is None else result


def _broadcast(local: Tensor, shape: Sequence[int], pipe: int, name: str, mesh: Mesh) -> Tensor:
    """Broadcast `local` of the rank with pipe coordinate `pipe` to all ranks along that axis."""
    if mesh.coordinate["pipe"] != pipe:
        local = local.new_empty(shape)
    local = local.contiguous()
    bytes_of_all = local.reshape(-1).view(torch.uint8)  # gloo knows few dtypes
    with naming_lost_peers(name):
        dist.broadcast(bytes_of_all, group=mesh.group("pipe"), group_src=pipe)
    return local


def _stacked(layout: Layout, mesh: Mesh, count: int) -> Layout:
    """The layout of `count` such values concatenated along dim 0, which is sharded over the batch axes first."""
    stacked = Layout((count * layout.shape[0], *layout.shape[1:]))
    outer = 1
    for axis in mesh.batch_axes:
        if mesh.sizes[axis] > 1:
            stacked = stacked.with_placement(axis, Shard(0, mesh.sizes[axis], outer))
            outer *= mesh.sizes[axis]
    for axis, placement in layout.axes:
        if isinstance(placement, Shard) and placement.dim == 0:
            placement = replace(placement, outer=count * placement.outer)
        stacked = stacked.with_placement(axis, placement)
    return stacked


def _join(pieces: Sequence[Tensor], spec: ResultSpec, mesh: Mesh) -> Tensor:
    if spec.batched:
        return torch.cat(list(pieces))
    if spec.layout.shape or not spec.dtype.is_floating_point:
        return pieces[-1]
    mean = torch.stack(list(pieces)).mean()
    for axis in mesh.batch_axes:
        if mesh.sizes[axis] > 1:
            with naming_lost_peers(spec.name):
                dist.all_reduce(mean, group=mesh.group(axis))
            mean /= mesh.sizes[axis]
    return mean


def _mesh_at(pipe: int, mesh: Mesh) -> DeviceMesh:
    """The mesh of the ranks with that pipe coordinate; on ranks with another, it has no process groups."""
    if mesh.coordinate["pipe"] == pipe:
        return mesh.stage_mesh
    assert mesh.device_mesh is not None, "the mesh was made without processes"
    ranks = mesh.device_mesh.mesh[pipe].reshape([mesh.sizes[axis] for axis in mesh.stage_axes])
    return device_mesh_without_groups(mesh.device_type, ranks, mesh.stage_axes)
