"""Finish a step's gradients: reduce what is partial, once per step, in flat buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.layout import Layout, Partial, Shard
from fxpar.mesh import Mesh
from fxpar.passes.bucket_collectives import BUCKET_BYTES
from fxpar.runtime.transport import complete


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
        names = [name for name in gradients if axis in partial_axes(layouts[name])]
        if mesh.sizes[axis] > 1 and names:
            step = _AllReduce(gradients, axis, mesh)
            step.begin(names)
            step.finish()


def summed_over_z(layouts: Mapping[str, Layout]) -> set[str]:
    """The gradients that are in shards over z, and so are sums over it."""
    return {name for name, layout in layouts.items() if isinstance(layout.placement("z"), Shard)}


class BatchReduction:
    """Sums of gradients over the batch shards, on their way from when this is made; they take the place of `gradients`.

    Along the second axis they go when they are finished along the first.

    Args:
        summed: those that are sums along z already: this rank has its shard of each.
    """

    def __init__(self, gradients: Mapping[str, Tensor], mesh: Mesh, summed: Collection[str] = ()) -> None:
        self._gradients = dict(gradients)
        whole = [name for name in gradients if name not in summed]
        wanted = {"data": list(gradients), "z": whole}
        self._steps = [
            (_AllReduce(self._gradients, axis, mesh), wanted[axis]) for axis in mesh.batch_axes if mesh.sizes[axis] > 1
        ]
        for step, names in self._steps[:1]:
            step.begin(names)

    def finish(self) -> dict[str, Tensor]:
        """The sums, once all shards are in.

        Raises:
            PeerLostError: another rank died.
        """
        for number, (step, names) in enumerate(self._steps):
            if number > 0:
                step.begin(names)
            step.finish()
        return self._gradients


class _AllReduce:
    """Sums over one axis, bucket by bucket, in place of the terms."""

    def __init__(self, gradients: dict[str, Tensor], axis: str, mesh: Mesh) -> None:
        self._gradients, self._axis, self._group = gradients, axis, mesh.group(axis)
        self._under_way: list[tuple[list[str], Tensor, dist.Work]] = []

    def begin(self, names: Sequence[str]) -> None:
        for bucket in _buckets(self._gradients, names):
            flat = torch.cat([self._gradients[name].reshape(-1) for name in bucket])
            self._under_way.append((bucket, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def finish(self) -> None:
        for bucket, flat, work in self._under_way:
            complete(work, f"gradients to their sum over axis {self._axis}")
            pieces = flat.split([self._gradients[name].numel() for name in bucket])
            for name, piece in zip(bucket, pieces, strict=True):
                self._gradients[name] = piece.view(self._gradients[name].shape)


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
