"""Emit one step of a redistribution into the local graph: a collective or a slice, and the views around it.

Collectives join and split the first dim. A digit inside a dim is therefore brought to the front of an unflattened view,
and put back in its place afterwards. A ragged dim is padded to equal pieces and narrowed again.

All this works on the dims in the logical value's stride order: so results keep that order, and few copies are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar.graph.graph_writer import LocalGraph, aten
from fxpar.graph.redistribute import RedistributeKind, RedistributeStep
from fxpar.ir.layout import Layout, Partial, Shard
from fxpar.ir.node_meta import CollectiveKind, Communication, Placed, set_awaited, set_communication, set_placed, tensor
from fxpar.ir.strides import inverse
from fxpar.world.mesh import Mesh


def emit_step(local: LocalGraph, node: fx.Node, step: RedistributeStep, order: Sequence[int], mesh: Mesh) -> fx.Node:
    """Append `step` on the local value `node`, whose logical value has the stride `order`; returns the new value."""
    if mesh.sizes[step.axis] == 1:
        return node
    site = _Site(local, mesh, RedistributeStep(step.axis, _permuted(step.before, order), _permuted(step.after, order)))
    result = local.contiguous(_EMIT[step.kind](site, local.permute(node, order)))
    moved = local.permute(result, inverse(order))
    if moved is not node:
        set_placed(moved, Placed((step.before,), (step.after,)))
    return moved


def _permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout of the permuted value, whose dim i is dim `order[i]` of `layout`."""
    axes = ((axis, replace(p, dim=order.index(p.dim)) if isinstance(p, Shard) else p) for axis, p in layout.axes)
    return Layout(tuple(layout.shape[dim] for dim in order), tuple(axes))


@dataclass(frozen=True, slots=True)
class _Site:
    """The context of a step: the local graph, the mesh as this rank has it, and the step with dims in stride order."""

    local: LocalGraph
    mesh: Mesh
    step: RedistributeStep

    @property
    def parts(self) -> int:
        return self.mesh.sizes[self.step.axis]

    @property
    def index(self) -> int:
        return self.mesh.coordinate[self.step.axis]

    @property
    def old(self) -> Shard:
        placement = self.step.before.placement(self.step.axis)
        assert isinstance(placement, Shard), f"{self.step} starts from no shard"
        return placement

    @property
    def new(self) -> Shard:
        placement = self.step.after.placement(self.step.axis)
        assert isinstance(placement, Shard), f"{self.step} leads to no shard"
        return placement

    @property
    def reduction(self) -> str:
        placement = self.step.before.placement(self.step.axis)
        assert isinstance(placement, Partial), f"{self.step} reduces nothing"
        return placement.op

    def logical_size(self, shard: Shard) -> int:
        return self.step.before.shape[shard.dim]

    def leading(self, shard: Shard) -> int:
        """The product of the digits before that of `shard` on this rank, where one held by an axis counts as 1."""
        held = {p for layout in (self.step.before, self.step.after) for _, p in layout.axes if isinstance(p, Shard)}
        before = [p.parts for p in held if p.dim == shard.dim and p.outer < shard.outer]
        return shard.outer // math.prod(before)

    def pad(self, node: fx.Node, shard: Shard, pieces: int) -> fx.Node:
        """Pad the ragged dim of `shard` to the length of `pieces` whole pieces."""
        if shard.fits(self.logical_size(shard)):
            return node
        return self.local.pad(node, shard.dim, pieces * -(-self.logical_size(shard) // self.parts))

    def split(self, node: fx.Node, shard: Shard) -> fx.Node:
        """Cut `node` at the digit of `shard`: the pieces for all ranks, stacked along the first dim."""
        node = self.pad(node, shard, self.parts)
        shape, dim, leading = list(tensor(node).shape), shard.dim, self.leading(shard)
        before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
        if math.prod(before) * leading > 1:
            node = self.local.view(node, [*before, leading, self.parts, size // leading // self.parts, *after])
            node = self.local.permute(node, [dim + 1, *range(dim + 1), *range(dim + 2, len(shape) + 2)])
        stacked = [*before, size // self.parts, *after]
        return self.local.view(node, [self.parts * stacked[0], *stacked[1:]])

    def join(self, node: fx.Node, shard: Shard) -> fx.Node:
        """The inverse of `split`, for the pieces of all ranks, stacked along the first dim."""
        first, *rest = tensor(node).shape
        shape, dim, leading = [first // self.parts, *rest], shard.dim, self.leading(shard)
        before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
        if math.prod(before) * leading > 1:
            node = self.local.view(node, [self.parts, *before, leading, size // leading, *after])
            node = self.local.permute(node, [*range(1, dim + 2), 0, *range(dim + 2, len(shape) + 2)])
        node = self.local.view(node, [*before, self.parts * size, *after])
        return self.trim(node, shard, 0, self.logical_size(shard))

    def own(self, node: fx.Node, shard: Shard) -> fx.Node:
        """Cut the padding off this rank's piece."""
        return self.trim(node, shard, 0, self.step.after.local_size(shard.dim, self.mesh.coordinate))

    def trim(self, node: fx.Node, shard: Shard, start: int, stop: int) -> fx.Node:
        if shard.fits(self.logical_size(shard)):
            return node
        return self.local.narrow(node, shard.dim, start, stop)

    def collective(self, kind: CollectiveKind, node: fx.Node, *args: object) -> fx.Node:
        """The functional collective `kind`, and the wait for it."""
        source = self.local.contiguous(node)
        target = _COLLECTIVES[kind]
        started = self.local.call(target, source, *args, self.mesh.group(self.step.axis).group_name)
        set_communication(
            started, Communication(kind, self.step.axis, max(tensor(source).nbytes, tensor(started).nbytes))
        )
        wait = self.local.call(c10d_functional.wait_tensor.default, started)
        set_awaited(wait, started)
        return wait


_COLLECTIVES: Mapping[CollectiveKind, Callable[..., Any]] = {
    "all_reduce": c10d_functional.all_reduce.default,
    "all_gather": c10d_functional.all_gather_into_tensor.default,
    "reduce_scatter": c10d_functional.reduce_scatter_tensor.default,
    "all_to_all": c10d_functional.all_to_all_single.default,
}


def _slice(site: _Site, node: fx.Node) -> fx.Node:
    new, local = site.new, site.local
    if not new.fits(site.logical_size(new)):
        ((start, stop),) = site.step.after.ranges(new.dim, site.mesh.coordinate)
        return local.narrow(node, new.dim, start, stop)
    shape, leading = list(tensor(node).shape), site.leading(new)
    width = shape[new.dim] // leading // site.parts
    if leading == 1:
        return local.narrow(node, new.dim, site.index * width, (site.index + 1) * width)
    node = local.view(node, [*shape[: new.dim], leading, site.parts, width, *shape[new.dim + 1 :]])
    node = local.call(aten.select.int, node, new.dim + 1, site.index)
    return local.view(node, [*shape[: new.dim], leading * width, *shape[new.dim + 1 :]])


def _all_reduce(site: _Site, node: fx.Node) -> fx.Node:
    return site.collective("all_reduce", node, site.reduction)


def _all_gather(site: _Site, node: fx.Node) -> fx.Node:
    return site.join(site.collective("all_gather", site.pad(node, site.old, 1), site.parts), site.old)


def _reduce_scatter(site: _Site, node: fx.Node) -> fx.Node:
    pieces = site.split(node, site.new)
    return site.own(site.collective("reduce_scatter", pieces, site.reduction, site.parts), site.new)


def _all_to_all(site: _Site, node: fx.Node) -> fx.Node:
    pieces = site.split(site.pad(node, site.old, 1), site.new)
    sizes = [tensor(pieces).shape[0] // site.parts] * site.parts
    return site.own(site.join(site.collective("all_to_all", pieces, sizes, sizes), site.old), site.new)


def _contribute(site: _Site, node: fx.Node) -> fx.Node:
    """A replicated value as a partial one: for a sum, the first rank holds it and the others zeros; for a max, all."""
    if site.step.after.placement(site.step.axis) == Partial("sum") and site.index != 0:
        return site.local.call(aten.zeros_like.default, node)
    return node


_EMIT: Mapping[RedistributeKind, Callable[[_Site, fx.Node], fx.Node]] = {
    RedistributeKind.SLICE: _slice,
    RedistributeKind.REDUCE_SCATTER: _reduce_scatter,
    RedistributeKind.ALL_TO_ALL: _all_to_all,
    RedistributeKind.ALL_REDUCE: _all_reduce,
    RedistributeKind.ALL_GATHER: _all_gather,
    RedistributeKind.CONTRIBUTE: _contribute,
}
