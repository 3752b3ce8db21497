"""Finish a step's gradients: all-reduce partial ones once per step, in flat buckets planned before the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar._torch.distributed import c10d_functional
from fxpar.ir.layout import Layout, Partial, Shard
from fxpar.lowering.cpu_collectives import sum_in_place
from fxpar.lowering.observed_collectives import WAIT_FOR, observed
from fxpar.passes.bucket_collectives import BUCKET_BYTES
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import Mesh


def own_memory(gradients: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """The gradients, each in a storage of its own, apart from all `others`, so that it can be changed in place."""
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


def summed_over_z(layouts: Mapping[str, Layout]) -> set[str]:
    """The gradients that are sharded over z, and therefore already reduced over it."""
    return {name for name, layout in layouts.items() if isinstance(layout.placement("z"), Shard)}


@dataclass(frozen=True, slots=True)
class Gradient:
    """What is known about a gradient before any step: its layout, and the size of this rank's piece."""

    name: str
    layout: Layout
    num_elements: int
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, layout: Layout, dtype: torch.dtype, mesh: Mesh) -> Gradient:
        """The gradient of the parameter `name` as this rank of `mesh` holds it."""
        return cls(name, layout, math.prod(layout.local_shape(mesh.coordinate)), dtype)

    @property
    def num_bytes(self) -> int:
        """Of this rank's piece."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AxisSums:
    """Sums of gradients over one axis: an all-reduce for each bucket, in this order.

    An all-reduce adds elements at the same position of the flat bucket, so all ranks of a group need the same buckets.
    """

    axis: str
    buckets: tuple[tuple[Gradient, ...], ...]

    def describe(self) -> list[str]:
        """What each bucket holds, in order; the same on all ranks of a group."""
        return [
            f"all_reduce of {', '.join(f'{each.name} ({each.num_elements} {each.dtype})' for each in bucket)}"
            for bucket in self.buckets
        ]


def sums_of_partial(gradients: Sequence[Gradient], mesh: Mesh) -> list[AxisSums]:
    """The sums of those gradients that are partial over y or x."""
    wanted = {axis: [each for each in gradients if axis in partial_axes(each.layout)] for axis in ("y", "x")}
    return _sums(wanted, mesh)


def sums_over_batch(gradients: Sequence[Gradient], mesh: Mesh) -> list[AxisSums]:
    """The sums over batch shards; gradients that are sharded over z are already reduced over it."""
    whole = [each for each in gradients if not isinstance(each.layout.placement("z"), Shard)]
    return _sums({"data": gradients, "z": whole}, mesh)


def _sums(wanted: Mapping[str, Sequence[Gradient]], mesh: Mesh) -> list[AxisSums]:
    return [AxisSums(axis, _buckets(each)) for axis, each in wanted.items() if mesh.sizes[axis] > 1 and each]


def _buckets(gradients: Iterable[Gradient]) -> tuple[tuple[Gradient, ...], ...]:
    """Gradients in order, cut where the dtype changes or a bucket is full."""
    buckets: list[list[Gradient]] = []
    held = 0
    for gradient in sorted(gradients, key=lambda each: str(each.dtype)):
        if not buckets or held + gradient.num_bytes > BUCKET_BYTES or buckets[-1][-1].dtype != gradient.dtype:
            buckets.append([])
            held = 0
        buckets[-1].append(gradient)
        held += gradient.num_bytes
    return tuple(map(tuple, buckets))


class AxisReductions:
    """All-reduces of `gradients` over one axis after another; those over the first axis start when this is made.

    Those over the next axis start in `finish`, when the ones before are done.
    """

    def __init__(self, gradients: Mapping[str, Tensor], sums: Sequence[AxisSums], mesh: Mesh) -> None:
        self._gradients = dict(gradients)
        self._steps = [_AllReduce(self._gradients, each, mesh) for each in sums]
        for step in self._steps[:1]:
            step.begin()

    def finish(self) -> dict[str, Tensor]:
        """Wait for all sums, and return them.

        Raises:
            PeerLostError: another rank died.
        """
        for number, step in enumerate(self._steps):
            if number > 0:
                step.begin()
            step.finish()
        return self._gradients


class _AllReduce:
    """All-reduces over one axis, bucket by bucket; the sums replace the terms in `gradients`."""

    def __init__(self, gradients: dict[str, Tensor], sums: AxisSums, mesh: Mesh) -> None:
        self._gradients, self._sums, self._group = gradients, sums, mesh.group(sums.axis)
        self._value = f"gradients to their sum over axis {sums.axis}"
        self._label = f"all_reduce over {sums.axis}"
        self._under_way: list[Tensor] = []

    def begin(self) -> None:
        for bucket in self._sums.buckets:
            flat = torch.cat([self._gradients[each.name].reshape(-1) for each in bucket])
            planned = sum(each.num_elements for each in bucket), bucket[0].dtype
            assert (flat.numel(), flat.dtype) == planned, f"{bucket}: {planned} is planned, not {flat.shape}"
            with naming_lost_peers(self._value):
                self._under_way.append(observed(self._label, sum_in_place, flat, self._group.group_name))

    def finish(self) -> None:
        for bucket, started in zip(self._sums.buckets, self._under_way, strict=True):
            with naming_lost_peers(self._value):
                flat = observed(f"{WAIT_FOR}{self._label}", c10d_functional.wait_tensor, started)
            pieces = flat.split([each.num_elements for each in bucket])
            for each, piece in zip(bucket, pieces, strict=True):
                self._gradients[each.name] = piece.view(self._gradients[each.name].shape)
