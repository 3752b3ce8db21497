"""Norms are taken apart where the mesh or a hint shards what they reduce over, and then cost statistics of rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.ir.hints import Spec
from fxpar.ir.node_meta import is_backward
from fxpar.ir.stage import JointGraph
from fxpar.layouts.pins import Pins
from fxpar.passes.decompose.norm_policy import NormPolicy, choose_norm_policy
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from tests.layouts.laid_out import LaidOut, lay_out, pins_of, prices
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs

ROWS, WIDTH = 64, 128


class Norms(nn.Module):
    """Two norms of a value that lies sharded over its hidden dim."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.table, self.spec = nn.Embedding(10, WIDTH), spec
        self.layer, self.root = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.table(numbers).tanh()
        x = fxpar.shard(x, self.spec) if self.spec else x
        return self.root(x + self.layer(x).sin()).cos().sum(0)


def graph_of(model: nn.Module) -> JointGraph:
    return joint_graph(model, torch.zeros(ROWS, dtype=torch.long))


def foreseen(model: nn.Module, hints: dict[str, Spec], **sizes: int) -> tuple[JointGraph, Pins, NormPolicy]:
    joint, pins = graph_of(model), pins_of(model, hints)
    with fake_mesh(**sizes) as mesh:
        norm_policy = choose_norm_policy(joint, mesh, pins)
    return replace(joint, module=decompose_for_sharding(joint.module, norm_policy)), pins, norm_policy


@pytest.mark.parametrize(
    ("sizes", "spec", "hints", "expected"),
    [
        ({}, (None, "x"), {}, NormPolicy(1, shards_hidden=False)),
        ({"x": 2}, (), {}, NormPolicy(2, shards_hidden=False)),
        ({"y": 2}, ("y", None), {"table.weight": ("y", None)}, NormPolicy(2, shards_hidden=False)),
        ({"y": 2, "x": 2}, (), {}, NormPolicy(4, shards_hidden=True)),
        ({"x": 4}, (None, "x"), {}, NormPolicy(4, shards_hidden=True)),
        ({"x": 2}, (), {"layer.weight": ("x",)}, NormPolicy(2, shards_hidden=True)),
        ({"x": 2}, (), {"table.weight": (None, "x")}, NormPolicy(2, shards_hidden=True)),
    ],
    ids=str,
)
def test_two_axes_or_a_hint_may_shard_hidden_dims(
    sizes: dict[str, int], spec: Spec, hints: dict[str, Spec], expected: NormPolicy
) -> None:
    assert foreseen(Norms(spec), hints, **sizes)[2] == expected


def test_norms_over_a_sharded_hidden_dim_cost_statistics_of_rows() -> None:
    """Two sums of a layer norm's forward, one of a root's; in the backward, where one has two sums, they are one."""
    joint, pins, _ = foreseen(Norms((None, "x")), {"table.weight": (None, "x")}, x=2)
    laid = lay_out(joint, pins, prices(latency_us=0.1), x=2)
    row = ROWS * torch.float32.itemsize
    assert sizes_of(laid, backward=False) == {("all_reduce", row): 3}
    assert sizes_of(laid, backward=True) == {("all_reduce", row): 1, ("all_reduce", 2 * row): 1}


def sizes_of(laid: LaidOut, *, backward: bool) -> Counter[tuple[str, int]]:
    return Counter((c.kind, c.num_bytes) for c in laid.collectives if is_backward(c.node) == backward)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"y": 2, "x": 2}], ids=str)
def test_all_ranks_together_compute_the_norms(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    joint, pins, _ = foreseen(Norms((None, "x")).double(), {"table.weight": (None, "x")}, **sizes)
    lay_out(joint, pins, prices(latency_us=0.1), **sizes)
    inputs = inputs_of(joint, 0)
    with fake_mesh(**sizes) as mesh:
        check_pieces(joint, mesh, run_local_graphs(joint, mesh, inputs), joint.module(*inputs))
