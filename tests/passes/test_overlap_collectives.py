"""Starts move up and waits down, by each rule alone; every rank has the same starts, and the same bits come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.graph.collective_sites import Site, find_sites
from fxpar.ir.layout import REPLICATE, Partial, Shard
from fxpar.ir.node_meta import Communication, communication
from fxpar.ir.overlap_options import NO_OVERLAP, OVERLAP_RULES, Overlap, OverlapRule
from fxpar.ir.stage import JointGraph
from fxpar.passes.bucket_collectives import bucket_collectives
from fxpar.passes.insert_collectives import collectives, insert_collectives
from fxpar.passes.memory.live_memory import peak_live_bytes
from fxpar.passes.overlap.gather_ahead import FARTHEST
from fxpar.passes.overlap_collectives import overlap_collectives
from fxpar.passes.partition import partition
from fxpar.rules.rule import Strategy
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.local_graphs import inputs_of, pieces_of
from tests.support.lockstep import run_ranks_in_lockstep
from tests.support.placements import Choose, as_told, at_random, lay_out
from tests.support.stored_graphs import lay_out_stored

Parts: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]

aten = torch.ops.aten

ROWS, COLUMNS = Shard(0, 2), Shard(1, 2)


class Chain(nn.Module):
    """Square matrices without biases."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.w:
            x = torch.relu(x @ weight)
        return x


class Mixed(nn.Module):
    """A norm, matrices of several shapes, a softmax and sums, of sizes that three does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return torch.softmax(x, dim=-1).sum(0)


def sharded_batch(node: fx.Node, strategies: Sequence[Strategy]) -> Strategy:
    """Weights are stored in rows, and needed whole; everything else has its part of the batch."""
    if node.op == "output":
        return Strategy((ROWS,) * len(node.args[0]), ())
    if node.op == "placeholder":
        return Strategy((), (ROWS,))
    operand = node.all_input_nodes[0]
    if node.target is aten.t.default:
        of_weight = operand.op == "placeholder" and operand.name.startswith("w_")
        wanted = strategies[0] if of_weight else Strategy((ROWS,), (COLUMNS,))
    elif operand.target is aten.t.default:
        wanted = Strategy((COLUMNS, ROWS), (Partial(),))
    elif node.target is aten.mm.default:
        wanted = Strategy((ROWS, REPLICATE), (ROWS,))
    else:
        wanted = Strategy((ROWS,) * len(node.all_input_nodes), (ROWS,))
    assert wanted in strategies, f"{node} cannot run as {wanted}"
    return wanted


def parts_of(model: nn.Module, choose: Choose, *inputs: Tensor) -> Parts:
    """Forward and backward of a model on the first of two ranks."""
    joint = joint_graph(model, *inputs)
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, choose)
        parts = partition(insert_collectives(joint, mesh))
    assert parts.backward is not None
    return parts.forward, parts.backward


@pytest.fixture(scope="module")
def gathering() -> Parts:
    return parts_of(Chain(4), sharded_batch, torch.randn(6, 8, requires_grad=True))


class TwoLayers(nn.Module):
    """Two matrices behind something that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Chain(2).w

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.relu(torch.softmax(x, dim=0) @ self.w[0]) @ self.w[1])


def columns_then_rows(node: fx.Node, strategies: Sequence[Strategy]) -> Strategy:
    """The first matrix of `TwoLayers` computes columns, the second takes rows."""
    if node.op == "output":
        return Strategy((REPLICATE, REPLICATE, COLUMNS, ROWS), ())
    return as_told(MEGATRON)(node, strategies)


PARTIAL_SUM = Strategy((COLUMNS, ROWS), (Partial(),))
TO_COLUMNS = Strategy((REPLICATE, COLUMNS), (COLUMNS,))
IN_COLUMNS = Strategy((COLUMNS,), (COLUMNS,))
MEGATRON = {
    "w_0": Strategy((), (COLUMNS,)),
    "w_1": Strategy((), (ROWS,)),
    "mm": TO_COLUMNS,
    "relu": IN_COLUMNS,
    "detach_1": IN_COLUMNS,
    "mm_1": PARTIAL_SUM,
    "t": Strategy((COLUMNS,), (ROWS,)),
    "mm_2": Strategy((ROWS, REPLICATE), (ROWS,)),
    "t_1": Strategy((ROWS,), (COLUMNS,)),
    "mm_3": TO_COLUMNS,
    "detach_4": IN_COLUMNS,
    "threshold_backward_1": Strategy((COLUMNS, COLUMNS), (COLUMNS,)),
    "mm_4": TO_COLUMNS,
    "t_3": Strategy((COLUMNS,), (ROWS,)),
    "mm_5": PARTIAL_SUM,
}


@pytest.fixture(scope="module")
def megatron() -> fx.GraphModule:
    """The backward of `TwoLayers`."""
    _, backward = parts_of(TwoLayers(), columns_then_rows, torch.randn(6, 8, requires_grad=True))
    return backward


def steps(module: fx.GraphModule) -> list[str]:
    """The names of what takes time: starts, waits and matmuls, and of what needs them all."""
    kept = ("mm", "wait", "all_", "reduce_", "_softmax_backward")
    return [node.name for node in module.graph.nodes if node.op == "call_function" and node.name.startswith(kept)]


def under(rule: OverlapRule, gather_ahead_bytes: float = math.inf, held_reductions: float = math.inf) -> Overlap:
    return Overlap(frozenset({rule}), gather_ahead_bytes, held_reductions)


def test_the_reduction_of_an_input_gradient_runs_beside_the_weight_gradients(megatron: fx.GraphModule) -> None:
    assert steps(megatron) == [
        *("mm_2", "mm_3", "mm_4", "mm_5"),
        *("all_reduce_1", "wait_tensor_1", "_softmax_backward_data"),
    ]
    assert steps(overlap_collectives(megatron, under("input_gradients"))) == [
        *("mm_3", "mm_5", "all_reduce_1", "mm_2", "mm_4"),
        *("wait_tensor_1", "_softmax_backward_data"),
    ]


def test_gradients_of_weights_are_waited_on_at_the_end(gathering: Parts) -> None:
    _, backward = gathering
    before = [
        *("mm_4", "reduce_scatter_tensor", "wait_tensor_4", "mm_5"),
        *("mm_6", "reduce_scatter_tensor_1", "wait_tensor_5", "mm_7"),
        *("mm_8", "reduce_scatter_tensor_2", "wait_tensor_6", "mm_9"),
        *("mm_10", "reduce_scatter_tensor_3", "wait_tensor_7", "mm_11"),
    ]
    waits = ["wait_tensor_4", "wait_tensor_5", "wait_tensor_6", "wait_tensor_7"]
    assert steps(backward) == before
    after = steps(overlap_collectives(backward, under("reduce_scatters")))
    assert after == [name for name in before if name not in waits] + waits


def test_gradients_of_weights_are_waited_on_earlier_where_too_many_would_be_held(gathering: Parts) -> None:
    _, backward = gathering
    two_at_once = steps(overlap_collectives(backward, under("reduce_scatters", held_reductions=2)))
    assert two_at_once == [
        *("mm_4", "reduce_scatter_tensor", "mm_5", "mm_6", "reduce_scatter_tensor_1", "mm_7", "mm_8"),
        *("wait_tensor_4", "reduce_scatter_tensor_2", "mm_9", "mm_10"),
        *("wait_tensor_5", "reduce_scatter_tensor_3", "mm_11", "wait_tensor_6", "wait_tensor_7"),
    ]
    one_at_once = steps(overlap_collectives(backward, under("reduce_scatters", held_reductions=0)))
    assert one_at_once.index("wait_tensor_4") == one_at_once.index("reduce_scatter_tensor_1") - 1


def test_what_a_reduction_holds_is_all_that_it_is_given(gathering: Parts) -> None:
    _, backward = gathering
    assert {site.held_bytes for site in find_sites(backward.graph, {"reduce_scatters"})} == {8 * 8 * 4}


def test_weights_are_gathered_one_layer_ahead(gathering: Parts) -> None:
    forward, _ = gathering
    gather = "all_gather_into_tensor"
    assert steps(forward) == [
        *(gather, "wait_tensor", "mm", f"{gather}_1", "wait_tensor_1", "mm_1"),
        *(f"{gather}_2", "wait_tensor_2", "mm_2", f"{gather}_3", "wait_tensor_3", "mm_3"),
    ]
    assert steps(overlap_collectives(forward, under("all_gathers"))) == [
        *(gather, f"{gather}_1", "wait_tensor", "mm", f"{gather}_2", "wait_tensor_1", "mm_1"),
        *(f"{gather}_3", "wait_tensor_2", "mm_2", "wait_tensor_3", "mm_3"),
    ]


class Scaled(Chain):
    """A chain whose results are scaled, before a softmax."""

    def __init__(self) -> None:
        super().__init__(2)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(super().forward(x) * self.scale, dim=-1)


def test_what_is_needed_after_the_last_matmul_is_gathered_ahead_too() -> None:
    def scale_is_needed_whole(node: fx.Node, strategies: Sequence[Strategy]) -> Strategy:
        if any(operand.name == "scale" for operand in node.all_input_nodes):
            return Strategy((ROWS, REPLICATE), (ROWS,))
        if node.target is aten.sum.dim_IntList:
            return Strategy((ROWS,), (Partial(),))
        if node.target is aten.view.default:
            return Strategy((Partial(),), (Partial(),))
        return sharded_batch(node, strategies)

    forward, _ = parts_of(Scaled(), scale_is_needed_whole, torch.randn(6, 8))
    names = steps(overlap_collectives(forward, under("all_gathers")))
    gathers = [name for name in names if name.startswith("all_gather")]
    assert names.index(gathers[-1]) < names.index("mm_1"), names


def test_what_is_needed_much_later_is_not_gathered_yet() -> None:
    between = FARTHEST + 2

    def few_are_sharded(node: fx.Node, strategies: Sequence[Strategy]) -> Strategy:
        whole = node.op == "placeholder" and node.name in {f"w_{layer}" for layer in range(1, between)}
        return strategies[0] if whole else sharded_batch(node, strategies)

    forward, _ = parts_of(Chain(between + 1), few_are_sharded, torch.randn(6, 8, requires_grad=True))
    names = steps(overlap_collectives(forward, under("all_gathers")))
    start, use = names.index("all_gather_into_tensor_1"), names.index(f"mm_{between}")
    assert [name for name in names[start:use] if name.startswith("mm")] == [f"mm_{i}" for i in range(2, between)]


def test_no_more_is_gathered_ahead_than_the_budget_allows(gathering: Parts) -> None:
    forward, _ = gathering
    (one, *_) = (found.num_bytes for found in collectives(forward.graph))
    assert steps(overlap_collectives(forward, under("all_gathers", one - 1))) == steps(forward)
    assert steps(overlap_collectives(forward, under("all_gathers", one))) != steps(forward)


@pytest.mark.parametrize("rule", OVERLAP_RULES)
def test_a_rule_alone_leaves_all_others_as_they_were(
    rule: OverlapRule, megatron: fx.GraphModule, gathering: Parts
) -> None:
    touched = {
        "input_gradients": [False, False, True],
        "reduce_scatters": [False, True, False],
        "all_gathers": [True, False, False],
    }
    graphs = [*gathering, megatron]
    changed = [steps(overlap_collectives(graph, under(rule))) != steps(graph) for graph in graphs]
    assert changed == touched[rule]


def test_without_rules_nothing_moves(megatron: fx.GraphModule, gathering: Parts) -> None:
    for graph in (*gathering, megatron):
        after = overlap_collectives(graph, NO_OVERLAP)
        assert [node.name for node in after.graph.nodes] == [node.name for node in graph.graph.nodes]


def test_memory_grows_by_what_is_under_way_and_no_more(megatron: fx.GraphModule, gathering: Parts) -> None:
    forward, backward = gathering
    weight, piece = 8 * 8 * 4, 4 * 8 * 4
    growths = [
        peak_live_bytes(overlap_collectives(graph, Overlap()).graph) - peak_live_bytes(graph.graph)
        for graph in (forward, backward, megatron)
    ]
    assert growths[0] <= weight, "one layer ahead"
    assert growths[1] <= 2 * weight + 2 * piece, "two gradients are reduced at once, and two weights gathered"
    assert growths[2] <= 6 * 8 * 4, "what is reduced stays while the weights' gradients are computed"


@pytest.mark.parametrize(("seed", "sizes"), [(0, {"x": 3}), (3, {"x": 3}), (2, {"y": 2, "x": 2})], ids=str)
def test_all_ranks_start_alike_and_get_the_same_bits_however_a_graph_is_laid_out(
    mixed: JointGraph, seed: int, sizes: dict[str, int]
) -> None:
    inputs = inputs_of(mixed, seed)
    with fake_mesh(**sizes) as mesh:
        lay_out(mixed, mesh, at_random(seed))
        local = [insert_collectives(mixed, as_rank(mesh, rank)).module for rank in range(mesh.num_ranks)]
        pieces = pieces_of(mixed, mesh, inputs)
        before = run_ranks_in_lockstep([module.graph for module in local], pieces, mesh)
        for overlap in (Overlap(), Overlap(gather_ahead_bytes=500)):
            after = [overlap_collectives(module, overlap) for module in local]
            assert len({starts(module) for module in after}) == 1, "ranks start different collectives"
            found = run_ranks_in_lockstep([module.graph for module in after], pieces, mesh)
            assert all(map(same_bits, found, before))


@pytest.mark.parametrize("sizes", [{"z": 3}, {"z": 2, "x": 2}], ids=str)
def test_weights_in_shards_are_gathered_ahead_one_by_one_or_together(mixed: JointGraph, sizes: dict[str, int]) -> None:
    inputs = inputs_of(mixed, 0)
    with fake_mesh(**sizes) as mesh:
        lay_out_stored(mixed, mesh, at_random(0))
        local = [insert_collectives(mixed, as_rank(mesh, rank)).module for rank in range(mesh.num_ranks)]
        for module in local:
            bucket_collectives(module, small_bytes=500)
        pieces = pieces_of(mixed, mesh, inputs)
        before = run_ranks_in_lockstep([module.graph for module in local], pieces, mesh)
        after = [overlap_collectives(module, Overlap()) for module in local]
        found = run_ranks_in_lockstep([module.graph for module in after], pieces, mesh)
        assert all(map(same_bits, found, before))
        of_weights = [site for site in find_sites(local[0].graph, set(OVERLAP_RULES)) if move_of(site).axis == "z"]
        assert {(move_of(site).kind, site.rule) for site in of_weights} == {
            ("all_gather", "all_gathers"),
            ("reduce_scatter", "reduce_scatters"),
        }
        assert len({starts(module) for module in after}) == 1, "ranks start different collectives"


def move_of(site: Site) -> Communication:
    done = communication(site.start)
    assert done is not None
    return done


@pytest.fixture(scope="module")
def mixed() -> JointGraph:
    return joint_graph(Mixed().double(), torch.randn(4, 6, 10, dtype=torch.double, requires_grad=True))


def starts(module: fx.GraphModule) -> tuple[tuple[str, str], ...]:
    return tuple((found.kind, found.axis) for found in collectives(module.graph))


def same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))
