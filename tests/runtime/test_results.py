"""Results of microbatches and batch shards become one DTensor on the last stage's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fxpar.ir.layout import Layout, Shard
from fxpar.ir.samples import Reduced
from fxpar.runtime.results import ResultSpec
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh, num_batch_shards
from tests.runtime.gather_results import batched, gather_all, whole_pieces

RESULT = Layout((4, 6))
SHARDS = [Shard(0, 2), Shard(0, 2, outer=2), Shard(1, 2), Shard(1, 2, outer=3)]
RAGGED = [Layout((3, 6), (("x", Shard(0, 2)),)), Layout((3, 5), (("x", Shard(1, 2)),))]
LAYOUTS = [RESULT, *(RESULT.with_placement("x", shard) for shard in SHARDS), *RAGGED]


TRANSPOSED = Layout((6, 4))


def placed(layout: Layout, *shards: Shard) -> list[Layout]:
    """The layout, and others that are sharded over x."""
    return [layout, *(layout.with_placement("x", shard) for shard in shards)]


SPECS = [
    *map(batched, LAYOUTS),
    *(batched(layout, 1) for layout in placed(TRANSPOSED, Shard(1, 2), Shard(0, 2), Shard(1, 2, outer=2))),
    *(batched(layout, 0, 3) for layout in placed(TRANSPOSED, Shard(0, 2), Shard(1, 2))),
    *(batched(layout, 1, 2) for layout in placed(TRANSPOSED, Shard(1, 2))),
]


def concatenated(pieces: Sequence[Tensor], samples: Shard) -> Tensor:
    """Part by part, the samples of each piece."""
    parts = [
        part for group in zip(*(p.chunk(samples.outer, samples.dim) for p in pieces), strict=True) for part in group
    ]
    return torch.cat(parts, samples.dim)


@pytest.mark.parametrize("sizes", [{"pipe": 2, "x": 2}, {"data": 2, "x": 2}, {"data": 2, "z": 2}], ids=str)
def test_batched_results_stand_in_the_order_of_the_batch(sizes: dict[str, int]) -> None:
    mesh, microbatches = Mesh(**sizes), 3
    specs = [spec for spec in SPECS if mesh.x > 1 or not spec.layout.axes]
    gathered = run_ranks(mesh.num_ranks, gather_all, [(spec, microbatches) for spec in specs], sizes)
    for rank, results in enumerate(gathered):
        for spec, (shape, found) in zip(specs, results, strict=True):
            shards = range(num_batch_shards(mesh))
            assert isinstance(spec.samples, Shard)
            whole = concatenated([p for shard in shards for p in whole_pieces(spec, shard, microbatches)], spec.samples)
            assert shape == whole.shape
            if mesh.coordinate_of(rank)["pipe"] == mesh.pipe - 1:
                assert torch.equal(found, whole), f"{spec.layout} with {spec.samples} on rank {rank}"


REDUCED: dict[Reduced, Callable[[Tensor], Tensor]] = {
    Reduced.SUM: lambda pieces: pieces.sum(0),
    Reduced.MAX: lambda pieces: pieces.amax(0),
    Reduced.MEAN: lambda pieces: pieces.mean(0),
}


def test_what_is_reduced_over_samples_is_reduced_over_the_parts_of_the_batch() -> None:
    sizes, microbatches = {"data": 2}, 4
    specs = [
        ResultSpec(Layout(shape), dtype, reduced)
        for reduced in REDUCED
        for shape, dtype in (((), torch.float64), ((3,), torch.float32), ((), torch.int64))
        if reduced is not Reduced.MEAN or dtype.is_floating_point
    ]
    for results in run_ranks(2, gather_all, [(spec, microbatches) for spec in specs], sizes):
        for spec, (_, found) in zip(specs, results, strict=True):
            pieces = torch.stack([p for shard in range(2) for p in whole_pieces(spec, shard, microbatches)])
            assert isinstance(spec.samples, Reduced)
            assert found.dtype == spec.dtype
            torch.testing.assert_close(found, REDUCED[spec.samples](pieces))


def test_of_unknown_results_scalars_are_averaged_and_others_are_the_last() -> None:
    sizes, microbatches = {"data": 2}, 4
    specs = [
        ResultSpec(Layout(()), torch.float64, Reduced.UNKNOWN),
        ResultSpec(Layout(()), torch.int64, Reduced.UNKNOWN),
        ResultSpec(Layout((3,)), torch.float32, None),
    ]
    for data, results in enumerate(run_ranks(2, gather_all, [(spec, microbatches) for spec in specs], sizes)):
        scalars = [p for shard in range(2) for p in whole_pieces(specs[0], shard, microbatches)]
        torch.testing.assert_close(results[0][1], torch.stack(scalars).mean())
        for spec, (_, found) in zip(specs[1:], results[1:], strict=True):
            assert torch.equal(found, whole_pieces(spec, data, microbatches)[-1])
