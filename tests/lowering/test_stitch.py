"""Every distinct region is compiled once and called in its place, and nothing is kept longer than it is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpar._torch.distributed import c10d_functional
from fxpar.ir.node_meta import tensor
from fxpar.ir.op_predicates import is_collective
from fxpar.ir.strides import is_dense
from fxpar.lowering.stitch import Compiled, stitch_regions
from tests.lowering.graphs import forward_and_backward, strides, traced
from tests.support.fake_mesh import fake_mesh
from tests.support.small_models import GPT


def run_as_it_is(region: fx.GraphModule) -> Compiled:
    def run(box: list[Tensor]) -> Sequence[Any]:
        tensors = list(box)
        box.clear()
        with torch.no_grad():
            return region(*tensors)

    return run


def counting() -> tuple[Callable[[fx.GraphModule], Compiled], list[fx.GraphModule]]:
    """A compiler, and what it has compiled so far."""
    seen: list[fx.GraphModule] = []

    def compile_region(region: fx.GraphModule) -> Compiled:
        seen.append(region)
        return run_as_it_is(region)

    return compile_region, seen


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        for _ in range(6):
            x = (x @ weight).relu()
    return x


WEIGHTS = [torch.eye(3) * scale for scale in (1.0, 2.0, 3.0)]


def test_the_graph_before_and_after() -> None:
    graph = traced(layers, torch.ones(2, 3), *WEIGHTS[:2])
    assert [node.name for node in graph.graph.nodes][3:7] == ["mm", "relu", "mm_1", "relu_1"]
    compile_region, compiled = counting()
    code = stitch_regions(graph, compile_region).code
    expected = """
def forward(self, arg0_1, arg1_1, arg2_1):
    box = fxpar_lowering_stitch__box(arg0_1, arg1_1);  arg0_1 = arg1_1 = None
    results = fxpar_lowering_stitch_region_0(box);  box = None
    getitem = results[0];  results = None
    box_1 = fxpar_lowering_stitch__box(getitem, arg2_1);  getitem = arg2_1 = None
    results_1 = fxpar_lowering_stitch_region_0(box_1);  box_1 = None
    getitem_1 = results_1[0];  results_1 = None
    return getitem_1
"""
    assert code.strip() == expected.strip()
    assert len(compiled) == 1


def test_forward_and_backward_of_a_model_give_the_same_bits_from_three_compilations_each() -> None:
    for case in forward_and_backward(GPT(layers=3), torch.randint(96, (2, 12)), torch.randint(96, (2, 12))):
        compile_region, compiled = counting()
        found = stitch_regions(case.graph, compile_region)(*case.inputs)
        assert len(compiled) == 3
        assert len(found) == len(case.expected)
        assert all(torch.equal(a, b) for a, b in zip(found, case.expected, strict=True))


def test_layers_share_code_though_different_values_of_them_are_used() -> None:
    def taps(x: Tensor, *weights: Tensor) -> list[Tensor]:
        kept = []
        for layer, weight in enumerate(weights):
            for step in range(6):
                x = (x @ weight).relu()
                if step == layer:
                    kept.append(x)
        return [*kept, x]

    inputs = [torch.rand(2, 3), *WEIGHTS]
    graph = traced(taps, *inputs)
    compile_region, compiled = counting()
    found = stitch_regions(graph, compile_region)(*inputs)
    assert len(compiled) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, taps(*inputs), strict=True))


def test_results_stay_none_repeated_or_inputs() -> None:
    graph = traced(lambda x: [x, None, y := x + 1, y, x], torch.ones(2))
    x = torch.ones(2)
    found = stitch_regions(graph, run_as_it_is)(x)
    assert found[0] is x and found[4] is x and found[1] is None
    assert found[2] is found[3] and torch.equal(found[2], x + 1)


def test_a_graph_without_ops_gives_its_inputs() -> None:
    graph = traced(lambda x: (x, None), torch.ones(2))
    x = torch.ones(2)
    found = stitch_regions(graph, run_as_it_is)(x)
    assert found[0] is x and found[1] is None


def test_constants_of_the_graph_reach_the_regions() -> None:
    graph = traced(lambda x: (x * 2,), torch.ones(2))
    (multiply,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    graph.register_buffer("constant", torch.tensor([3.0, 4.0]))
    with graph.graph.inserting_before(multiply):
        constant = graph.graph.get_attr("constant")
    constant.meta["val"] = multiply.meta["val"]
    multiply.args = (multiply.args[0], constant)
    assert stitch_regions(graph, run_as_it_is)(torch.ones(2))[0].tolist() == [3.0, 4.0]


def test_views_with_gaps_or_overlaps_are_taken_outside_of_compiled_code() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x + 1
        for _ in range(12):
            y = y.sin()
        narrow, wide = y[:, :2], y.sum(0).expand(5, 4, 3)
        return [narrow, wide, narrow.select(1, 1), x.diagonal(), *y.split(2, dim=1), y.transpose(0, 1)]

    x = torch.randn(4, 3)
    graph = traced(function, x)
    seen: list[Tensor] = []

    def compile_region(region: fx.GraphModule) -> Compiled:
        seen.extend(map(tensor, region.graph.output_node().args[0]))
        return run_as_it_is(region)

    found = stitch_regions(graph, compile_region)(x)
    assert seen and all(map(is_dense, seen))
    assert [value.stride() for value in found] == strides(graph)
    assert all(torch.equal(a, b) for a, b in zip(found, function(x), strict=True))


def test_what_one_layer_hands_to_the_next_is_freed_while_that_runs() -> None:
    graph = traced(layers, torch.ones(2, 3), *WEIGHTS)
    weights = {id(weight) for weight in WEIGHTS}
    freed: list[bool] = []

    def compile_region(region: fx.GraphModule) -> Compiled:
        def run(box: list[Tensor]) -> Sequence[Any]:
            position = next(i for i, tensor in enumerate(box) if id(tensor) not in weights)
            tensors = [tensor.clone() for tensor in box]
            stream = weakref.ref(box[position])
            box.clear()
            freed.append(stream() is None)
            return region(*tensors)

        return run

    stitch_regions(graph, compile_region)(torch.ones(2, 3), *WEIGHTS)
    assert freed == [False, True, True], "the caller holds the first layer's input; nobody holds the others'"


def test_collectives_stay_out_of_compiled_code_and_where_the_graph_has_them() -> None:
    def gather_ahead(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        started = [gather(weights[0])]
        for layer in range(len(weights)):
            started += map(gather, weights[layer + 1 : layer + 2])
            weight = c10d_functional.wait_tensor(started[layer]).view(3, 3)
            for _ in range(6):
                x = (x @ weight).relu()
        return (x,)

    def gather(value: Tensor) -> Tensor:
        return c10d_functional.all_gather_into_tensor(value.view(-1), 1, dist.group.WORLD.group_name)

    weights = [torch.eye(3) * scale for scale in (1.0, 2.0, 3.0, 4.0)]
    compile_region, compiled = counting()
    with fake_mesh():
        graph = traced(gather_ahead, torch.ones(2, 3), *weights)
        after = stitch_regions(graph, compile_region)
        (found,) = after(torch.ones(2, 3), *weights)
    assert [node.target for node in graph.graph.nodes if is_collective(node)] == [
        node.target for node in after.graph.nodes if is_collective(node)
    ]
    calls = [node.name.rstrip("_0123456789") for node in after.graph.nodes if node.op == "call_function"]
    gathering, waiting, layer = "all_gather_into_tensor", "wait_tensor", ["box", "results", "getitem"]
    assert calls == [
        *("view", gathering, "view", gathering, waiting, *layer, "view", gathering, waiting, *layer),
        *("view", gathering, waiting, *layer, waiting, *layer),
    ]
    assert len(compiled) == 1, "a layer"
    assert not [node for region in compiled for node in region.graph.nodes if is_collective(node)]
    assert found.shape == (2, 3)
