"""Forward, input gradients and weight gradients together are the joint graph, and I does nothing that can wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from fxpar.dump import format_graph
from fxpar.graph.min_cut import is_free_to_recompute
from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import JointGraph, PortKind
from fxpar.lowering import lower
from fxpar.passes.insert_collectives import collectives, insert_collectives
from fxpar.passes.partition import partition
from fxpar.passes.split_backward import SplitBackward
from tests.passes.test_partition import Attention
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.halves import decomposed, joints_of, run_parts, split
from tests.support.local_graphs import inputs_of, pieces_of
from tests.support.lockstep import run_ranks_in_lockstep
from tests.support.placements import at_random, lay_out
from tests.support.small_models import GPT, hf_gpt2, hf_llama

aten = torch.ops.aten
CONVOLUTION = aten.convolution_backward.default


def check_bits(joint: JointGraph) -> SplitBackward:
    """F, then I, then W give the very bits of the joint graph."""
    parts, halves = split(joint)
    values = inputs_of(joint, seed=3)
    torch.manual_seed(7)
    expected = joint.module(*values)
    torch.manual_seed(7)
    found = run_parts(joint, parts, halves, values, lower("aten"))
    assert len(found) == len(expected)
    for port, a, b in zip([*joint.outputs, *joint.gradients], found, expected, strict=True):
        assert torch.equal(a, b), f"{port} of stage {joint.index}"
    return halves


def count(module: fx.GraphModule, target: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def work(module: fx.GraphModule) -> set[str]:
    """The names of the ops that cost something."""
    return {node.name for node in module.graph.nodes if node.op == "call_function" and not is_free_to_recompute(node)}


def entering(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


Made = tuple[nn.Module, Any, list[str]]


def gpt() -> Made:
    tokens = torch.randint(96, (2, 12))
    return GPT(layers=3), (tokens, tokens), ["blocks.1.up", "blocks.2"]


def gpt2() -> Made:
    tokens = torch.randint(96, (2, 12))
    return hf_gpt2(), {"input_ids": tokens, "labels": tokens}, ["transformer.h.1"]


def llama() -> Made:
    tokens = torch.randint(96, (2, 12))
    return hf_llama(), {"input_ids": tokens, "labels": tokens}, ["model.layers.1"]


def attention() -> Made:
    return Attention(), (torch.randn(2, 4, 8), torch.randint(0, 5, (2, 4))), ["qkv", "head"]


@pytest.mark.parametrize("make", [gpt, gpt2, llama, attention])
def test_the_parts_give_the_very_bits_of_the_joint_graph(make: Callable[[], Made]) -> None:
    for joint in joints_of(*make()):
        check_bits(decomposed(joint))


def test_nothing_but_views_runs_twice_and_nothing_is_lost() -> None:
    for joint in joints_of(*gpt()):
        parts, halves = split(joint)
        assert parts.backward is not None
        inputs, weights = work(halves.inputs), work(halves.weights)
        assert not inputs & weights
        assert not (inputs | weights) & work(parts.forward)
        assert inputs | weights == work(parts.backward)


class Chain(nn.Sequential):
    """Modules one after another, then a sum as the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def linears() -> Chain:
    """Four matrix products and biases."""
    return Chain(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)))


def test_a_linear_layer_has_one_product_in_each_half() -> None:
    _, second = joints_of(linears(), (torch.randn(5, 6),), ["1"])
    halves = check_bits(second)
    assert [count(half, aten.mm.default) for half in (halves.inputs, halves.weights)] == [3, 3]
    assert count(halves.inputs, aten.sum.dim_IntList) == 0, "gradients of biases can wait"


def test_the_first_stage_only_hands_its_tangents_through() -> None:
    first, _ = joints_of(linears(), (torch.randn(5, 6),), ["2"])
    halves = check_bits(first)
    assert not work(halves.inputs)
    assert (halves.inputs_saved, halves.num_carried) == ((), 1)
    assert entering(halves.inputs) == entering(halves.weights)[len(halves.weights_saved) :]


def test_a_stage_whose_parameters_need_no_gradient_has_nothing_to_do_later() -> None:
    model = linears()
    model[2:].requires_grad_(False)
    _, second = joints_of(model, (torch.randn(5, 6),), ["2"])
    halves = check_bits(second)
    assert {port.kind for port in second.gradients} == {PortKind.EDGE}
    assert (halves.weights_saved, halves.num_carried) == ((), 0)
    assert [node.op for node in halves.weights.graph.nodes] == ["output"]


def test_all_edges_get_their_gradients_from_the_first_half() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(torch.relu(a))
            return (self.c(torch.relu(b)) * a).sum()

    joints = joints_of(Skip(), (torch.randn(5, 6),), ["b", "c"])
    halves = [check_bits(joint) for joint in joints]
    edges = [sum(port.kind is PortKind.EDGE for port in joint.gradients) for joint in joints]
    assert edges == [0, 1, 2]
    given = [len(half.inputs.graph.output_node().args[0]) for half in halves]  # type: ignore[arg-type]
    assert given == [number + half.num_carried for number, half in zip(edges, halves, strict=True)]


def test_the_gradient_of_a_tied_weight_is_summed_in_the_second_half() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.up(torch.relu(self.up(self.first(x))))).sum()

    _, second = joints_of(Tied(), (torch.randn(5, 6),), ["up"])
    halves = check_bits(second)
    assert (count(halves.inputs, aten.add.Tensor), count(halves.weights, aten.add.Tensor)) == (0, 1)


def test_a_gradient_that_is_a_tangent_is_handed_through() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    model = Chain(nn.Linear(6, 6), Add(), nn.Linear(6, 6))
    _, middle, _ = joints_of(model, (torch.randn(5, 6),), ["1", "2"])
    halves = check_bits(middle)
    assert not work(halves.inputs)
    assert not work(halves.weights)
    assert halves.num_carried == 1
    assert entering(halves.inputs) == entering(halves.weights)


def test_an_op_with_several_results_runs_in_the_first_half_and_its_gradients_of_weights_are_carried() -> None:
    _, second = joints_of(Chain(nn.Linear(6, 6), nn.LayerNorm(6)), (torch.randn(5, 6),), ["1"])
    halves = check_bits(second)
    assert count(halves.inputs, aten.native_layer_norm_backward.default) == 1
    assert {node.op for node in halves.weights.graph.nodes} == {"placeholder", "output"}
    assert halves.num_carried == 2


class Convolutions(nn.Module):
    """Residual blocks of a U-shaped network."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.down:
            x = x + torch.relu(self.norm(convolution(x)))
        return self.up(x).mean()


def test_the_gradients_of_a_convolution_are_computed_apart() -> None:
    for joint in joints_of(Convolutions(), (torch.randn(2, 4, 8, 8),), ["down.1"]):
        halves = check_bits(decomposed(joint))
    masks = [
        Counter(tuple(node.args[10]) for node in half.graph.find_nodes(op="call_function", target=CONVOLUTION))
        for half in (halves.inputs, halves.weights)
    ]
    assert masks[0] == {(True, False, False): 3}
    assert masks[1] == {(False, True, False): 3}


def test_the_whole_backward_is_left_as_it_was() -> None:
    _, joint = joints_of(Convolutions(), (torch.randn(2, 4, 8, 8),), ["down.1"])
    parts, _ = split(joint)
    whole = partition(joint)
    assert parts.backward is not None
    assert whole.backward is not None
    assert format_graph(parts.backward) == format_graph(whole.backward)


def test_what_only_the_first_half_needs_is_freed_with_it() -> None:
    _, second = joints_of(Chain(nn.Linear(6, 6), nn.Sigmoid(), nn.Tanh()), (torch.randn(5, 6),), ["1"])
    _, halves = split(second)
    assert halves.inputs_saved
    assert halves.weights_saved == ()


def test_the_part_that_weights_need_is_carried_as_a_copy() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:2] * self.weight, x[2:]])

    model = Chain(nn.Linear(4, 4), Rows(), nn.Tanh(), nn.Linear(4, 4))
    _, middle, _ = joints_of(model, (torch.randn(20, 4),), ["1", "3"])
    _, halves = split(middle)
    carried = halves.inputs.graph.output_node().args[0][1:]  # type: ignore[index]
    assert [tuple(tensor(node).shape) for node in carried] == [(2, 4)]
    values = [torch.randn(tensor(node).shape) for node in halves.inputs.graph.find_nodes(op="placeholder")]
    (rows,) = halves.inputs(*values)[1:]
    assert rows.untyped_storage().nbytes() == rows.nbytes, "the carried rows hold on to the whole gradient"


@pytest.mark.parametrize("seed", range(2))
def test_with_collectives_every_rank_gives_the_very_bits_of_its_local_graph(seed: int) -> None:
    tokens = torch.randint(96, (2, 12))
    joint = decomposed(joints_of(GPT(layers=2), (tokens, tokens), ["blocks.1"])[1])
    assert [port.kind for port in joint.gradients].index(PortKind.EDGE) == 0
    num_inputs, num_outputs = len(joint.inputs), len(joint.outputs)
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, at_random(seed))
        ranks = [insert_collectives(joint, as_rank(mesh, rank)) for rank in range(2)]
        values = pieces_of(joint, mesh, inputs_of(joint, seed))
        forwards, halves = zip(*map(split, ranks), strict=True)
        graphs = [rank.module.graph for rank in ranks]
        expected = run_ranks_in_lockstep(graphs, values, mesh)

        graphs = [parts.forward.graph for parts in forwards]
        made = run_ranks_in_lockstep(graphs, [given[:num_inputs] for given in values], mesh)
        saved = [given[num_outputs:] for given in made]
        taken = [[kept[i] for i in half.inputs_saved] for half, kept in zip(halves, saved, strict=True)]
        taken = [[*kept, *given[num_inputs:]] for kept, given in zip(taken, values, strict=True)]
        of_inputs = run_ranks_in_lockstep([half.inputs.graph for half in halves], taken, mesh)
        taken = [[kept[i] for i in half.weights_saved] for half, kept in zip(halves, saved, strict=True)]
        taken = [[*kept, *given[1:]] for kept, given in zip(taken, of_inputs, strict=True)]
        of_weights = run_ranks_in_lockstep([half.weights.graph for half in halves], taken, mesh)
    assert collectives(halves[0].inputs.graph), "the seed shards nothing"
    for rank in range(2):
        found = [*made[rank][:num_outputs], of_inputs[rank][0], *of_weights[rank]]
        assert all(torch.equal(a, b) for a, b in zip(found, expected[rank], strict=True))


class Layer(nn.Module):
    """A layer of one of several kinds, over (rows, 4, 4)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "linear":
                return torch.relu(self.linear(x))
            case "residual":
                return x + self.linear(self.norm(x))
            case "scale":
                return x.transpose(1, 2) * self.scale
            case "halves":
                a, b = self.linear(x).chunk(2, dim=-1)
                return torch.cat([b, a.exp()], dim=-1)
            case "row":
                return torch.cat([x[:1] * self.scale, x[1:].sin()])
            case _:
                return functional.dropout(x * self.scale.sum(), 0.5)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.sampled_from(["linear", "residual", "scale", "halves", "row", "dropout"]), min_size=2, max_size=5),
    st.data(),
)
def test_any_cut_of_any_chain_gives_the_very_bits(kinds: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(1, len(kinds) - 1))
    for joint in joints_of(Chain(*map(Layer, kinds)), (torch.randn(3, 4, 4),), [str(start)]):
        check_bits(joint)


def test_inductor_compiles_both_halves() -> None:
    model = Chain(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    for joint in joints_of(model, (torch.randn(6, 8),), ["1"]):
        parts, halves = split(joint)
        values = inputs_of(joint, seed=1)
        with torch.no_grad():
            found = run_parts(joint, parts, halves, values, lower("inductor"))
        for a, b in zip(found, joint.module(*values), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_before_and_after() -> None:
    _, second = joints_of(Chain(nn.Linear(3, 4), nn.Linear(4, 2), nn.ReLU()), (torch.randn(5, 3),), ["1"])
    parts, halves = split(second)
    assert parts.backward is not None
    assert (
        format_graph(parts.backward)
        == """\
def forward(
    input_1: f32[5, 4],
    _1_weight: f32[2, 4],
    relu: f32[5, 2],
    gradient_of_result_0: f32[()],
):

    # backward of (no module)
    expand: f32[5, 2] = aten.expand(gradient_of_result_0, [5, 2])

    # 2
    detach: f32[5, 2] = aten.detach(relu)

    # backward of 2
    detach_1: f32[5, 2] = aten.detach(detach)
    threshold_backward: f32[5, 2] = aten.threshold_backward(expand, detach_1, 0)

    # 1
    t: f32[4, 2] = aten.t(_1_weight)

    # backward of 1
    t_1: f32[2, 4] = aten.t(t)
    mm: f32[5, 4] = aten.mm(threshold_backward, t_1)
    t_2: f32[2, 5] = aten.t(threshold_backward)
    mm_1: f32[2, 4] = aten.mm(t_2, input_1)
    t_3: f32[4, 2] = aten.t(mm_1)
    sum_2: f32[1, 2] = aten.sum.dim_IntList(threshold_backward, [0], True)
    view: f32[2] = aten.view(sum_2, [2])
    t_4: f32[2, 4] = aten.t(t_3)

    return (mm, t_4, view)
"""
    )
    assert (
        format_graph(halves.inputs)
        == """\
def forward(
    _1_weight: f32[2, 4],
    relu: f32[5, 2],
    gradient_of_result_0: f32[()],
):

    # backward of (no module)
    expand: f32[5, 2] = aten.expand(gradient_of_result_0, [5, 2])

    # 2
    detach: f32[5, 2] = aten.detach(relu)

    # backward of 2
    detach_1: f32[5, 2] = aten.detach(detach)
    threshold_backward: f32[5, 2] = aten.threshold_backward(expand, detach_1, 0)

    # 1
    t: f32[4, 2] = aten.t(_1_weight)

    # backward of 1
    t_1: f32[2, 4] = aten.t(t)
    mm: f32[5, 4] = aten.mm(threshold_backward, t_1)

    return (mm, threshold_backward)
"""
    )
    assert (
        format_graph(halves.weights)
        == """\
def forward(
    input_1: f32[5, 4],
    threshold_backward: f32[5, 2],
):

    # backward of 1
    t_2: f32[2, 5] = aten.t(threshold_backward)
    mm_1: f32[2, 4] = aten.mm(t_2, input_1)
    t_3: f32[4, 2] = aten.t(mm_1)
    sum_2: f32[1, 2] = aten.sum.dim_IntList(threshold_backward, [0], True)
    view: f32[2] = aten.view(sum_2, [2])
    t_4: f32[2, 4] = aten.t(t_3)

    return (t_4, view)
"""
    )
    assert (halves.inputs_saved, halves.weights_saved, halves.num_carried) == ((1, 2), (0,), 1)
