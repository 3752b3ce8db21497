"""What ranks do to gather results; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.ir.layout import Layout, Shard
from fxpar.ir.tiles import shard_of
from fxpar.runtime.results import ResultSpec, gather_result
from fxpar.world.mesh import init_mesh


def whole_pieces(spec: ResultSpec, batch_shard: int, microbatches: int) -> list[Tensor]:
    """The logical result of each microbatch of a batch shard."""
    generator = torch.Generator().manual_seed(batch_shard)
    shape = (microbatches, *spec.layout.shape)
    return list(torch.randint(0, 100, shape, generator=generator).to(spec.dtype))


def gather_all(layouts: Sequence[tuple[ResultSpec, int]], sizes: dict[str, int]) -> list[tuple[torch.Size, Tensor]]:
    """The logical shape, and the whole value on the last stage's ranks, of results in so many microbatches."""
    mesh = init_mesh(**sizes)
    at = mesh.coordinate
    gathered = []
    for spec, microbatches in layouts:
        pieces = None
        if at["pipe"] == mesh.pipe - 1:
            whole = whole_pieces(spec, mesh.batch_shard(at), microbatches)
            pieces = [shard_of(piece, spec.layout, at).contiguous() for piece in whole]
        result = gather_result(pieces, spec, mesh, microbatches, mesh.pipe - 1)
        gathered.append((result.shape, torch.empty(0) if pieces is None else result.full_tensor()))
    return gathered


def batched(layout: Layout, dim: int = 0, outer: int = 1) -> ResultSpec:
    """A result that consists of samples along `dim`, within each of `outer` parts."""
    return ResultSpec(layout, torch.float32, Shard(dim, layout.shape[dim] // outer, outer))
