"""What runs once per step: gathers in front of the graphs of microbatches, reductions behind them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.ir.stage import JointGraph
from fxpar.passes.bucket_collectives import bucket_collectives
from fxpar.passes.hoist_storage import hoist_storage
from fxpar.passes.insert_collectives import collectives, insert_collectives
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.placements import at_random
from tests.support.stored_graphs import Batches, lay_out_stored, run_stored


class Block(nn.Module):
    """A fused attention, a weight that is used twice, and a head of a size that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.twice = nn.Linear(12, 12, bias=False)
        self.head = nn.Linear(12, 11)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 6, 3, 2, 6).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        x = self.twice(self.twice(x + self.scale * mixed.transpose(1, 2).reshape(2, 6, 12)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def block() -> JointGraph:
    return joint_graph(Block().double(), torch.randn(2, 6, 12).double(), torch.zeros(2, 6, dtype=torch.long))


@pytest.mark.parametrize(
    ("sizes", "gathers", "reductions", "small_bytes"),
    [
        ({"z": 3}, False, False, 0),
        ({"z": 3}, True, True, 1500),
        ({"z": 3}, True, False, 0),
        ({"z": 2, "x": 2}, False, False, 1500),
        ({"z": 2, "x": 2}, False, True, 0),
        ({"z": 2, "x": 2}, True, True, 0),
    ],
)
def test_gradients_are_sums_over_z_and_microbatches(
    block: JointGraph, sizes: dict[str, int], gathers: bool, reductions: bool, small_bytes: int
) -> None:
    with fake_mesh(**sizes) as mesh:
        border = lay_out_stored(block, mesh, at_random(mesh.num_ranks))
        local = [insert_collectives(block, as_rank(mesh, rank)) for rank in range(mesh.num_ranks)]
        counts = [len(collectives(graph.module.graph)) for graph in local]
        for graph in local:
            bucket_collectives(graph.module, small_bytes)
        joined = [len(collectives(graph.module.graph)) for graph in local]
        assert (joined < counts) == (small_bytes > 0)
        ranks = [hoist_storage(graph, gathers=gathers, reductions=reductions) for graph in local]
        for each in ranks:
            over_z = [c.kind for c in collectives(each.body.module.graph) if c.axis == "z"]
            assert ("all_gather" in over_z, "reduce_scatter" in over_z) == (not gathers, not reductions)
        batches = Batches(block, mesh, border, 2)
        batches.check(run_stored(ranks, batches, 2, mesh))
