"""Join the microbatches of a result: to a DTensor on the last stage's ranks or all, or to what a batch shard has."""

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
from fxpar.ir.samples import Reduced, Samples
from fxpar.ir.stage import PlannedStage, Port, PortKind
from fxpar.runtime.remote_result import RemoteResult
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import Mesh, num_batch_shards


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """A result of the forward: its layout for one microbatch, its dtype, and where the samples are in it.

    `samples` is None for a result that does not depend on the batch. `requires_grad` is that of the result in the
    single-device model. `name` is for messages.
    """

    layout: Layout
    dtype: torch.dtype
    samples: Samples | None = None
    requires_grad: bool = False
    name: str = "the result"


def result_specs(capture: Capture, last: PlannedStage) -> tuple[ResultSpec, ...]:
    """The specs of the forward's results, in order; `last` is the last stage."""
    specs = []
    for position, node in enumerate(capture.results):
        port = Port(PortKind.RESULT, str(position))
        layout, value = last.border.outputs[port], example(node)
        name = f"result {position} of the forward ({value.dtype}, shape {tuple(value.shape)} for each microbatch)"
        specs.append(ResultSpec(layout, value.dtype, last.samples.get(port), value.requires_grad, name))
    return tuple(specs)


def gather_result(
    pieces: Sequence[Tensor] | None,
    spec: ResultSpec,
    mesh: Mesh,
    microbatches: int,
    pipe: int,
    *,
    on_all_stages: bool = False,
) -> DTensor:
    """The result of a step as a DTensor, over all microbatches and batch shards.

    A result with a batch dim is concatenated along it; a sum over samples is added up, a mean is averaged, and of
    maxima the largest is taken. Of any other result that depends on the batch, a floating-point scalar is averaged, and
    what is no such scalar is that of the last microbatch.

    Args:
        pieces: this rank's pieces, one per microbatch; None on the ranks of other stages.
        pipe: the coordinate of the result's stage on the pipe axis.
        on_all_stages: whether it is broadcast over the pipe axis, so that every rank gets a DTensor on the mesh of its
            own stage. Otherwise it is a DTensor on the ranks of its stage, and a RemoteResult on all others.

    Raises:
        PeerLostError: another rank died.
    """
    layout, samples = spec.layout, spec.samples
    if isinstance(samples, Shard):
        if layout.is_ragged(samples.dim) or samples.outer > 1:  # pieces of parts would not make up a piece of the batch
            pieces = pieces and [_whole(piece, layout, mesh) for piece in pieces]
            layout = Layout(layout.shape)
        layout = _stacked(layout, samples, mesh, microbatches * num_batch_shards(mesh))
    local = torch.empty(0, dtype=spec.dtype, device=mesh.device_type) if pieces is None else _join(pieces, spec, mesh)
    if on_all_stages and mesh.pipe > 1:
        local = _broadcast(local, layout.local_shape(mesh.coordinate), pipe, spec.name, mesh)
        return from_local(local, layout, mesh.stage_mesh)
    result = from_local(local, layout, _mesh_at(pipe, mesh))
    return RemoteResult.of(result, spec.name) if pieces is None else result


def own_result(pieces: Sequence[Tensor] | None, spec: ResultSpec, mesh: Mesh, microbatches: int, pipe: int) -> Tensor:
    """The same on every rank as a plain tensor, but of samples only those of this rank's batch shard.

    Raises:
        PeerLostError: another rank died.
    """
    joined, samples, shape = torch.empty(0, dtype=spec.dtype, device=mesh.device_type), spec.samples, spec.layout.shape
    if isinstance(samples, Shard):
        shape = tuple(size * microbatches if dim == samples.dim else size for dim, size in enumerate(shape))
    if pieces is not None and isinstance(samples, Shard):
        joined = _concatenated([_whole(piece, spec.layout, mesh) for piece in pieces], samples)
    elif pieces is not None:
        joined = _whole(_join(pieces, spec, mesh), spec.layout, mesh)
    return joined if mesh.pipe == 1 else _broadcast(joined, shape, pipe, spec.name, mesh)


def _whole(piece: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The value of which each rank of a stage has a piece, beside other samples on other batch shards."""
    return from_local(piece, layout, mesh.stage_mesh).full_tensor()


def _broadcast(local: Tensor, shape: Sequence[int], pipe: int, name: str, mesh: Mesh) -> Tensor:
    """Broadcast `local` of the rank with pipe coordinate `pipe` to all ranks along that axis."""
    if mesh.coordinate["pipe"] != pipe:
        local = local.new_empty(shape)
    local = local.contiguous()
    bytes_of_all = local.reshape(-1).view(torch.uint8)  # gloo knows few dtypes
    with naming_lost_peers(name):
        dist.broadcast(bytes_of_all, group=mesh.group("pipe"), group_src=pipe)
    return local


def _stacked(layout: Layout, samples: Shard, mesh: Mesh, count: int) -> Layout:
    """The layout of `count` such values concatenated along their samples, which the batch axes shard first.

    Samples in several parts of a dim are on all ranks: DTensor cannot join shards of shards of such parts.
    """
    dim, outer = samples.dim, 1
    shape = list(layout.shape)
    shape[dim] *= count
    stacked = Layout(tuple(shape))
    for axis in mesh.batch_axes if samples.outer == 1 else ():
        if mesh.sizes[axis] > 1:
            stacked = stacked.with_placement(axis, Shard(dim, mesh.sizes[axis], outer))
            outer *= mesh.sizes[axis]
    for axis, placement in layout.axes:
        if isinstance(placement, Shard) and placement.dim == dim:
            placement = replace(placement, outer=count * placement.outer)
        stacked = stacked.with_placement(axis, placement)
    return stacked


def _join(pieces: Sequence[Tensor], spec: ResultSpec, mesh: Mesh) -> Tensor:
    """What this rank's batch shard has of the result, or what is the same on all."""
    samples = spec.samples
    if isinstance(samples, Shard):
        return _concatenated(pieces if samples.outer == 1 else _of_all_shards(pieces, spec, mesh), samples)
    if samples is Reduced.SUM:
        return _reduced(pieces, spec, mesh, dist.ReduceOp.SUM)
    if samples is Reduced.MAX:
        return _reduced(pieces, spec, mesh, dist.ReduceOp.MAX)
    if samples is Reduced.MEAN or (samples is not None and not spec.layout.shape and spec.dtype.is_floating_point):
        return _reduced(pieces, spec, mesh, dist.ReduceOp.SUM) / (len(pieces) * num_batch_shards(mesh))
    return pieces[-1]


def _concatenated(pieces: Sequence[Tensor], samples: Shard) -> Tensor:
    """The samples of all pieces, one after another within each of the `samples.outer` parts of their dim."""
    dim = samples.dim
    parted = [piece.unflatten(dim, (samples.outer, -1)) for piece in pieces]
    return torch.cat(parted, dim + 1).flatten(dim, dim + 1)


def _of_all_shards(pieces: Sequence[Tensor], spec: ResultSpec, mesh: Mesh) -> list[Tensor]:
    """The pieces of all batch shards, in order."""
    gathered = torch.stack(list(pieces))
    for axis in reversed(mesh.batch_axes):
        if mesh.sizes[axis] > 1:
            of_ranks = [torch.empty_like(gathered) for _ in range(mesh.sizes[axis])]
            with naming_lost_peers(spec.name):
                dist.all_gather(of_ranks, gathered, group=mesh.group(axis))
            gathered = torch.cat(of_ranks)
    return list(gathered)


def _reduced(pieces: Sequence[Tensor], spec: ResultSpec, mesh: Mesh, op: dist.ReduceOp.RedOpType) -> Tensor:
    """All pieces of all batch shards, reduced by `op`."""
    stacked = torch.stack(list(pieces))
    total = stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0, dtype=spec.dtype)
    return reduce_over_shards(total, op, spec.name, mesh)


def reduce_over_shards(value: Tensor, op: dist.ReduceOp.RedOpType, name: str, mesh: Mesh) -> Tensor:
    """Reduce a value over all batch shards, in place, and return it; `name` is for messages.

    Raises:
        PeerLostError: another rank died.
    """
    for axis in mesh.batch_axes:
        if mesh.sizes[axis] > 1:
            with naming_lost_peers(name):
                dist.all_reduce(value, op, group=mesh.group(axis))
    return value


def _mesh_at(pipe: int, mesh: Mesh) -> DeviceMesh:
    """The mesh of the ranks with that pipe coordinate; on ranks with another, it has no process groups."""
    if mesh.coordinate["pipe"] == pipe:
        return mesh.stage_mesh
    assert mesh.device_mesh is not None, "the mesh was made without processes"
    ranks = mesh.device_mesh.mesh[pipe].reshape([mesh.sizes[axis] for axis in mesh.stage_axes])
    return device_mesh_without_groups(mesh.device_type, ranks, mesh.stage_axes)
