"""Compute the numbers of a step that depend on its whole batch, before the first microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch.lazy_graph_module import code_of
from fxpar.ir.batch_totals import BatchTotals, Extreme, dtype_of_mean
from fxpar.ir.stage import Port, PortKind
from fxpar.runtime.microbatches import Microbatches
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import Mesh, num_batch_shards


class StepTotals:
    """Called with what a step is called with, the inputs not yet split; returns the totals by name.

    A collective of the ranks that differ in their batch shard alone.

    Args:
        batch_dims: the dim along which each input is split into microbatches; inputs not named are shared.
    """

    def __init__(self, totals: BatchTotals, mesh: Mesh, microbatches: int, batch_dims: Mapping[str, int]) -> None:
        self._totals = totals
        self._mesh = mesh
        self._microbatches = microbatches
        self._split = Microbatches(microbatches, batch_dims)
        self._of_microbatch, self._of_batch = code_of(totals.of_microbatch), code_of(totals.of_batch)

    def __call__(self, inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The totals, from this batch shard's inputs.

        Raises:
            PeerLostError: another rank has ended.
        """
        totals, held = self._totals, {PortKind.INPUT: inputs, PortKind.BUFFER: buffers}
        given = [self._pieces(port, held[port.kind][port.name]) for port in totals.inputs]
        of_parts = [self._of_microbatch(*pieces) for pieces in zip(*given, strict=True)]
        reduced = list(zip(*of_parts, strict=True))
        num_sums = len(reduced) - len(totals.extremes)
        means = self._means([sum(parts[1:], parts[0]) for parts in reduced[:num_sums]]) if num_sums else []
        extremes = self._extremes([torch.stack(parts) for parts in reduced[num_sums:]])
        found = self._of_batch(*means, *extremes, *(held[port.kind][port.name] for port in totals.constants))
        named = zip(totals.results, found, totals.dtypes, strict=True)
        return {port.name: total.to(dtype) for port, total, dtype in named}

    def _pieces(self, port: Port, value: Tensor) -> Sequence[Tensor]:
        """What each microbatch has of a value."""
        return self._split.pieces(port.name, value) if port.kind is PortKind.INPUT else [value] * self._microbatches

    def _means(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The means over all parts of the batch, from the sums over those of this batch shard."""
        flat = torch.cat([each.double().reshape(-1) for each in sums])
        for axis in self._mesh.batch_axes:
            if self._mesh.sizes[axis] > 1:
                with naming_lost_peers("sums over the batch"):
                    dist.all_reduce(flat, group=self._mesh.group(axis))
        flat /= self._microbatches * num_batch_shards(self._mesh)
        means = flat.split([each.numel() for each in sums])
        return [mean.view(each.shape).to(dtype_of_mean(each)) for mean, each in zip(means, sums, strict=True)]

    def _extremes(self, of_parts: Sequence[Tensor]) -> list[Tensor]:
        """The largest or smallest values of the whole batch, from those of the parts of this batch shard."""
        pairs = zip(of_parts, self._totals.extremes, strict=True)
        return [self._reduced(each.amax(0) if kind == "max" else each.amin(0), kind) for each, kind in pairs]

    def _reduced(self, value: Tensor, kind: Extreme) -> Tensor:
        """The extreme of all batch shards."""
        found = value.to(torch.uint8) if value.dtype == torch.bool else value.clone()
        operation = dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.MIN
        for axis in self._mesh.batch_axes:
            if self._mesh.sizes[axis] > 1:
                with naming_lost_peers("extremes over the batch"):
                    dist.all_reduce(found, operation, group=self._mesh.group(axis))
        return found.to(value.dtype)
