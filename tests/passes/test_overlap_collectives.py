"""Starts move up and waits down, by each rule alone, and no more memory is taken than for what is under way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.graph.collective_sites import find_sites
from fxpar.ir.layout import REPLICATE, Partial
from fxpar.ir.overlap_options import NO_OVERLAP, OVERLAP_RULES, Overlap, OverlapRule
from fxpar.passes.insert_collectives import collectives
from fxpar.passes.memory.live_memory import peak_live_bytes
from fxpar.passes.overlap.gather_ahead import FARTHEST
from fxpar.passes.overlap_collectives import overlap_collectives
from fxpar.rules.rule import Strategy
from tests.passes.overlapping import COLUMNS, ROWS, Chain, Parts, parts_of, sharded_batch
from tests.support.placements import as_told

aten = torch.ops.aten


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
