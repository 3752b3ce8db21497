"""What runs once per step: gathers in front of the graphs of microbatches, reductions behind them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.passes.hoist_storage import hoist_storage
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.stage import JointGraph
from tests.fake_mesh import as_rank, fake_mesh
from tests.joint_graphs import joint_graph
from tests.placements import at_random
from tests.stored_graphs import Batches, lay_out_stored, run_stored


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


@pytest.mark.parametrize("gathers", [False, True], ids=["gathers in graph", "gathers once"])
@pytest.mark.parametrize("reductions", [False, True], ids=["reductions in graph", "reductions once"])
@pytest.mark.parametrize(("seed", "sizes"), [(0, {"z": 2}), (1, {"z": 3, "x": 2})], ids=str)
def test_gradients_are_sums_over_z_and_microbatches(
    block: JointGraph, seed: int, sizes: dict[str, int], gathers: bool, reductions: bool
) -> None:
    with fake_mesh(**sizes) as mesh:
        border = lay_out_stored(block, mesh, at_random(seed))
        ranks = [
            hoist_storage(insert_collectives(block, as_rank(mesh, rank)), gathers=gathers, reductions=reductions)
            for rank in range(mesh.num_ranks)
        ]
        batches = Batches(block, mesh, border, 2)
        batches.check(run_stored(ranks, batches, 2, mesh))
