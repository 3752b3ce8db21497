"""Finish a step's gradients: reduce what is partial, once per step, in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.layout import Layout, Partial
from fxpar.mesh import Mesh
from fxpar.runtime.transport import complete

BUCKET_BYTES = 25 * 2**20
"""As large as DistributedDataParallel's: past it a larger message is no faster, below it latency shows."""


def own_memory(gradients: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """The same gradients, each in memory that none of the `others` shares, so that it can be changed in place."""
    taken = {other.untyped_storage().data_ptr() for other in others}
    owned = []
    for gradient in gradients:
        storage = gradient.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != gradient.nbytes:
            gradient = gradient.clone()
        taken.add(storage.data_ptr())
        owned.append(gradient)
    return owned


def partial_axes(layout: Layout) -> tuple[str, ...]:
    """The axes over which a value still has to be summed."""
    return tuple(axis for axis, placement in layout.axes if isinstance(placement, Partial))


def reduce_partial(gradients: dict[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Sum every gradient over the axes on which its layout is partial, in place of the old one."""
    for axis in ("y", "x"):
        _all_reduce(gradients, [name for name in gradients if axis in partial_axes(layouts[name])], axis, mesh)


def reduce_over_batch(gradients: dict[str, Tensor], mesh: Mesh) -> None:
    """Sum every gradient over the batch shards, in place of the old one."""
    for axis in mesh.batch_axes:
        _all_reduce(gradients, list(gradients), axis, mesh)


def _all_reduce(gradients: dict[str, Tensor], names: list[str], axis: str, mesh: Mesh) -> None:
    if mesh.sizes[axis] == 1 or not names:
        return
    group = mesh.group(axis)
    reductions = []
    for bucket in _buckets(gradients, names):
        flat = torch.cat([gradients[name].reshape(-1) for name in bucket])
        reductions.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in reductions:
        complete(work, f"gradients to their sum over axis {axis}")
        pieces = flat.split([gradients[name].numel() for name in bucket])
        for name, piece in zip(bucket, pieces, strict=True):
            gradients[name] = piece.view(gradients[name].shape)


def _buckets(gradients: Mapping[str, Tensor], names: Iterable[str]) -> list[list[str]]:
    """Names in order, cut where the dtype changes or a bucket is full; the same on every rank of a group."""
    buckets: list[list[str]] = []
    held = 0
    for name in sorted(names, key=lambda name: str(gradients[name].dtype)):
        gradient = gradients[name]
        if not buckets or held + gradient.nbytes > BUCKET_BYTES or gradients[buckets[-1][-1]].dtype != gradient.dtype:
            buckets.append([])
            held = 0
        buckets[-1].append(name)
        held += gradient.nbytes
    return buckets
