"""Layers become equal regions, forwards and backwards; regions cover a graph in its order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.lowering.regions import Region, split_regions
from fxpar.passes.logical_random import logical_random
from fxpar.passes.partition import partition
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.lowering.graphs import Case, forward_and_backward, traced, traced_module
from tests.passes.fusing import Local, fuse_always, modules_of
from tests.support.captures import captured
from tests.support.fake_mesh import fake_mesh
from tests.support.small_models import GPT, Block

LAYERS = 3


def test_a_fused_op_is_a_region_with_its_results_and_is_not_compiled() -> None:
    def around(local: Local) -> list[fx.Node]:
        x, w = local.given(3, 4), local.given(4, 5)
        product = local.call(
            torch.ops.aten.mm.default, local.gathered(local.call(torch.ops.aten.relu.default, x), 0), w
        )
        return [local.call(torch.ops.aten.relu.default, product)]

    with fake_mesh(x=2) as mesh:
        (fused, _) = fuse_always(modules_of(around, mesh), mesh)
    before, op, behind = split_regions(fused.module.graph)
    assert [node.name for node in op.nodes] == ["all_gather_matmul", "getitem"] and op.communicates
    assert not before.communicates and not behind.communicates and behind.inputs == (op.nodes[1],)


@pytest.fixture(scope="module")
def gpt() -> list[Case]:
    return gpt_cases(GPT(layers=LAYERS))


def gpt_cases(model: nn.Module) -> list[Case]:
    return list(forward_and_backward(model, torch.randint(96, (2, 12)), torch.randint(96, (2, 12))))


def shared(regions: list[Region]) -> list[int]:
    """For each region, how many of the graph's regions could share its code."""
    signatures = [region.signature for region in regions]
    return [signatures.count(signature) for signature in signatures]


def test_layers_of_a_forward_and_of_a_backward_are_equal_regions(gpt: list[Case]) -> None:
    for case in gpt:
        counts = shared(split_regions(case.graph.graph))
        assert counts == [1, *[LAYERS] * LAYERS, 1]


def test_layers_that_draw_random_numbers_are_equal_regions() -> None:
    model = GPT(layers=LAYERS)
    for block in model.blocks:
        block.attention.out = nn.Sequential(block.attention.out, nn.Dropout(0.1))
    tokens = torch.randint(96, (2, 12))
    (stage,) = split_stages(captured(model, (tokens, tokens))[0], [])
    parts = partition(logical_random(trace_joint(stage, with_backward=True)))
    assert parts.backward is not None
    for graph in (parts.forward.graph, parts.backward.graph):
        assert shared(split_regions(graph)) == [1, *[LAYERS] * LAYERS, 1]


@pytest.mark.parametrize("change", ["shape", "op", "constant"])
def test_layers_that_differ_are_not_equal_regions(change: str) -> None:
    model = GPT(layers=2)
    first, second = model.blocks
    if change == "shape":
        second.up, second.down = nn.Linear(24, 48), nn.Linear(48, 24)
    elif change == "op":
        second.attention.out = nn.Sequential(second.attention.out, nn.Tanh())
    else:
        first.attention.out = nn.Sequential(first.attention.out, nn.LeakyReLU(0.1))
        second.attention.out = nn.Sequential(second.attention.out, nn.LeakyReLU(0.2))
    for case in gpt_cases(model):
        assert shared(split_regions(case.graph.graph)) == [1]


def test_regions_are_the_graph_in_an_order_in_which_it_can_run(gpt: list[Case]) -> None:
    for case in gpt:
        regions = split_regions(case.graph.graph)
        covered = [node for region in regions for node in region.nodes]
        assert len(covered) == len(set(covered))
        assert set(covered) == {node for node in case.graph.graph.nodes if node.op == "call_function"}
        done = set(case.graph.graph.find_nodes(op="placeholder"))
        for region in regions:
            assert set(region.inputs) <= done
            done.update(region.nodes)


def test_only_the_residual_stream_goes_from_layer_to_layer() -> None:
    model = nn.Sequential(*(Block(24, 4, fused=True) for _ in range(LAYERS)))
    regions = split_regions(traced_module(model, torch.randn(2, 12, 24)).graph)
    assert shared(regions) == [LAYERS] * LAYERS
    assert [len(region.outputs) for region in regions] == [1] * LAYERS


def test_views_of_what_the_forward_saved_belong_to_the_layer_that_uses_them() -> None:
    def backward(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in [weight.t() for weight in weights]:
            for _ in range(6):
                x = (x @ weight).relu()
        return x

    regions = split_regions(traced(backward, *(torch.randn(4, 4) for _ in range(3))).graph)
    assert shared(regions) == [2, 2]
    assert all(str(region.nodes[0].target) == "aten.t.default" for region in regions)


def test_random_numbers_are_drawn_in_the_order_of_the_graph() -> None:
    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.rand(3)
        second = torch.rand(3)
        return x + second, x + first

    (region,) = split_regions(traced(draw, torch.randn(3)).graph)
    assert [node.name for node in region.nodes] == ["rand", "rand_1", "add", "add_1"]


def test_a_graph_without_ops_has_no_regions() -> None:
    assert split_regions(traced(lambda x: (x, None), torch.randn(2)).graph) == []


def test_the_same_ops_wired_differently_are_not_equal_regions() -> None:
    def twisted(x: Tensor) -> Tensor:
        for layer in range(2):
            y = x
            for _ in range(7):
                x, y = (x.sin(), y.cos()) if layer == 0 else (y.sin(), x.cos())
            x = x + y
        return x

    regions = split_regions(traced(twisted, torch.randn(2, 3)).graph)
    assert shared(regions) == [1, 1]
