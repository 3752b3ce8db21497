"""Results of microbatches and batch shards become one DTensor on the last stage's ranks."""

from __future__ import annotations

import pytest
import torch

from fxpar.ir.layout import Layout, Shard
from fxpar.runtime.results import ResultSpec
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh
from tests.runtime.gather_results import batched, gather_all, whole_pieces

RESULT = Layout((4, 6))
SHARDS = [Shard(0, 2), Shard(0, 2, outer=2), Shard(1, 2), Shard(1, 2, outer=3)]
RAGGED = [Layout((3, 6), (("x", Shard(0, 2)),)), Layout((3, 5), (("x", Shard(1, 2)),))]
LAYOUTS = [RESULT, *(RESULT.with_placement("x", shard) for shard in SHARDS), *RAGGED]


@pytest.mark.parametrize("sizes", [{"pipe": 2, "x": 2}, {"data": 2, "x": 2}], ids=str)
def test_batched_results_stand_in_the_order_of_the_batch(sizes: dict[str, int]) -> None:
    mesh, microbatches = Mesh(**sizes), 3
    specs = [batched(layout) for layout in LAYOUTS]
    gathered = run_ranks(mesh.num_ranks, gather_all, [(spec, microbatches) for spec in specs], sizes)
    for rank, results in enumerate(gathered):
        for spec, (shape, found) in zip(specs, results, strict=True):
            whole = [p for data in range(mesh.data) for p in whole_pieces(spec, data, microbatches)]
            assert shape == torch.cat(whole).shape
            if mesh.coordinate_of(rank)["pipe"] == mesh.pipe - 1:
                assert torch.equal(found, torch.cat(whole)), f"{spec.layout} on rank {rank}"


def test_of_results_without_a_batch_scalars_are_averaged_and_others_are_the_last() -> None:
    sizes, microbatches = {"data": 2}, 4
    specs = [
        ResultSpec(Layout(()), torch.float64, False),
        ResultSpec(Layout(()), torch.int64, False),
        ResultSpec(Layout((3,)), torch.float32, False),
    ]
    for data, results in enumerate(run_ranks(2, gather_all, [(spec, microbatches) for spec in specs], sizes)):
        losses = [p for shard in range(2) for p in whole_pieces(specs[0], shard, microbatches)]
        torch.testing.assert_close(results[0][1], torch.stack(losses).mean())
        for spec, (_, found) in zip(specs[1:], results[1:], strict=True):
            assert torch.equal(found, whole_pieces(spec, data, microbatches)[-1])
