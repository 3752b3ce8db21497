"""What runs again in the backward: regions, cheap ops where that saves memory, and the gathers of weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fxpar.ir.node_meta import is_backward, region
from fxpar.ir.remat import Remat
from fxpar.ir.stage import JointGraph
from fxpar.passes.insert_collectives import collectives, insert_collectives
from fxpar.passes.memory.activation_memory import activation_memory
from fxpar.passes.partition import Partitioned, partition
from fxpar.passes.split_backward import split_backward
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.local_graphs import inputs_of
from tests.support.placements import as_told
from tests.support.small_models import hf_gpt2
from tests.support.stored_graphs import lay_out_stored

aten = torch.ops.aten
NORM = aten.native_layer_norm.default

FULL, MIN_CUT = Remat("full"), Remat("min_cut")


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks, those of the numbers in `regions` checkpointed by the model itself, one inside another if `nested`."""

    def __init__(self, count: int, regions: tuple[int, ...] = (), *, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.regions, self.nested = regions, nested

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number in self.regions:
                run = (lambda y, b=block: checkpoint(b, y, use_reentrant=False)) if self.nested else block
                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = block(x)
        return x.square().mean()


def products(module: fx.GraphModule | None) -> list[str]:
    """The names of the matrix products."""
    assert module is not None
    return [
        node.name
        for node in module.graph.nodes
        if node.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    ]


def check_bits(joint: JointGraph, parts: Partitioned) -> None:
    """Forward and backward, whole and in halves, give the bits of the joint graph."""
    values = inputs_of(joint, 0)
    num_inputs, num_outputs = len(joint.inputs), len(joint.outputs)
    expected = joint.module(*values)
    given = parts.forward(*values[:num_inputs])
    assert parts.backward is not None
    found = [*given[:num_outputs], *parts.backward(*given[num_outputs:], *values[num_inputs:])]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def saved_bytes(joint: JointGraph, remat: Remat) -> int:
    return activation_memory(joint, partition(joint, remat)).saved_bytes


@pytest.mark.parametrize("nested", [False, True])
def test_what_the_model_checkpoints_is_computed_again_from_what_enters_it(nested: bool) -> None:
    joint = joint_graph(Blocks(3, regions=(0, 2), nested=nested), torch.randn(4, 8))
    assert {region(node) for node in joint.module.graph.nodes if not is_backward(node)} >= {"0", "1", None}
    parts = partition(joint)
    check_bits(joint, parts)
    again = set(products(parts.forward)) & set(products(parts.backward))
    assert again == {"addmm", "addmm_4"}, "the last product of a region only leaves it"
    plain = joint_graph(Blocks(3), torch.randn(4, 8))
    assert saved_bytes(joint, Remat()) < saved_bytes(plain, Remat())


class EndsInNorm(nn.Module):
    """A checkpointed region that an op of several results ends, of which one leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: self.norm(functional.gelu(self.up(z))), x, use_reentrant=False)
        return self.down(y).square().mean()


def test_an_op_whose_result_leaves_its_region_runs_once_and_its_other_results_are_kept() -> None:
    joint = joint_graph(EndsInNorm(), torch.randn(4, 8))
    parts = partition(joint)
    check_bits(joint, parts)
    assert parts.backward is not None
    assert "addmm" in products(parts.backward)
    norms = [len(part.graph.find_nodes(op="call_function", target=NORM)) for part in (parts.forward, parts.backward)]
    assert norms == [1, 0]


def test_full_recomputation_keeps_what_enters_the_layers_alone() -> None:
    rows = 4
    joint = joint_graph(Blocks(3), torch.randn(rows, 8))
    parts = partition(joint, FULL)
    check_bits(joint, parts)
    borders = 3 * rows * 8 * 4  # what enters the second and the third block, and what is squared
    assert saved_bytes(joint, FULL) == borders


def test_layers_run_again_one_at_a_time() -> None:
    joint = joint_graph(Blocks(3), torch.randn(4, 8))
    backward = partition(joint, FULL).backward
    assert backward is not None
    order = [node.name for node in backward.graph.nodes]
    wanted = ["addmm_4", "mm_3", "addmm_2", "mm_7", "addmm", "mm_11"]  # of each: its first product, its last gradient
    assert sorted(wanted, key=order.index) == wanted


def test_min_cut_repeats_no_product_and_keeps_less() -> None:
    joint = joint_graph(Blocks(2), torch.randn(4, 8))
    parts = partition(joint, MIN_CUT)
    check_bits(joint, parts)
    assert not set(products(parts.forward)) & set(products(parts.backward))
    assert saved_bytes(joint, MIN_CUT) <= saved_bytes(joint, Remat())


def test_all_policies_on_a_transformer() -> None:
    ids = torch.randint(0, 10, (2, 8))
    joint = joint_graph(hf_gpt2(layers=2), input_ids=ids, labels=ids)
    kept = {remat.policy: saved_bytes(joint, remat) for remat in (Remat(), MIN_CUT, FULL)}
    assert kept["full"] < kept["min_cut"] <= kept["none"]
    for remat in (MIN_CUT, FULL):
        check_bits(joint, partition(joint, remat))


def test_buffers_that_change_are_not_read_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    joint = joint_graph(model, torch.randn(4, 8))
    parts = partition(joint, FULL)
    assert parts.backward is not None
    norms = [node for node in parts.backward.graph.nodes if "batch_norm" in str(node.target) and not is_backward(node)]
    assert norms == []


def test_halves_of_the_backward_share_what_is_computed_again() -> None:
    joint = joint_graph(Blocks(2), torch.randn(4, 8, requires_grad=True))
    parts = partition(joint, FULL)
    halves = split_backward(joint, parts)
    assert not set(products(halves.inputs)) & set(products(halves.weights))


def test_gathered_weights_are_kept_as_far_as_the_budget_goes() -> None:
    weight, small = 32 * 8 * 4, 2 * (4 * 8 + 32) * 4
    joint = joint_graph(Blocks(2), torch.randn(4, 8))
    with fake_mesh(z=2) as mesh:
        lay_out_stored(joint, mesh, as_told({}))
        local = insert_collectives(joint, mesh)
    for remat in (Remat(), FULL):
        for budget, weights_gathered_again in ((math.inf, 0), (2 * weight + small, 2), (0, 4)):
            parts = partition(local, replace(remat, gathered_bytes=budget))
            assert parts.backward is not None
            found = [each for each in collectives(parts.backward.graph) if each.kind == "all_gather"]
            again = [each for each in found if each.num_bytes == weight]
            assert len(again) == weights_gathered_again, f"{remat} with {budget} bytes"
