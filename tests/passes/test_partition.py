"""Forward and backward together are the joint graph, and little is kept in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxpar.dump import format_graph
from fxpar.ir.layout import REPLICATE, Partial, Shard
from fxpar.ir.node_meta import is_backward, tensor
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.insert_collectives import collectives, insert_collectives
from fxpar.passes.partition import Partitioned, partition
from fxpar.rules.rule import Strategy
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.placements import as_told, lay_out


class Attention(nn.Module):
    """What makes partitioning interesting: views of one value, a random mask, ops with several results, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x) * self.scale).view(2, 4, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = functional.dropout(x + mixed.transpose(1, 2).reshape(2, 4, 8), 0.25)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def run(parts: Partitioned, num_outputs: int, inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    """The outputs and gradients, by way of the saved values."""
    results = parts.forward(*inputs)
    outputs, saved = results[:num_outputs], results[num_outputs:]
    assert len(saved) == parts.num_saved
    assert parts.backward is not None
    return [*outputs, *parts.backward(*saved, *tangents)]


def saved_names(parts: Partitioned) -> list[str]:
    """The names of the values that cross, inputs among them."""
    assert parts.backward is not None
    return [node.name for node in parts.backward.graph.find_nodes(op="placeholder")][: parts.num_saved]


def names(module: fx.GraphModule) -> set[str]:
    return {node.name for node in module.graph.nodes if node.op == "call_function"}


def inputs_of(model: nn.Module, joint: JointGraph, arguments: Sequence[Tensor]) -> list[Tensor]:
    """What the joint graph takes, without tangents, in its order."""
    values = {Port(PortKind.PARAMETER, name): value.detach() for name, value in model.named_parameters()}
    values |= {Port(PortKind.BUFFER, name): value for name, value in model.named_buffers()}
    given = iter(arguments)
    return [values[port] if port in values else next(given) for port in joint.inputs]


def test_forward_then_backward_give_the_very_bits_of_the_joint_graph() -> None:
    model = Attention()
    arguments = [torch.randn(2, 4, 8), torch.randint(0, 5, (2, 4))]
    joint = joint_graph(model, *arguments)
    inputs, tangents = inputs_of(model, joint, arguments), [torch.randn(())]
    torch.manual_seed(7)
    expected = joint.module(*inputs, *tangents)
    torch.manual_seed(7)
    found = run(partition(joint), len(joint.outputs), inputs, tangents)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_view_is_taken_again_rather_than_saved() -> None:
    joint = joint_graph(Attention(), torch.randn(2, 4, 8), torch.randint(0, 5, (2, 4)))
    parts = partition(joint)
    saved = saved_names(parts)
    assert "addmm" in saved, "queries, keys and values are views of one product"
    assert not {"getitem_3", "getitem_4", "getitem_5"} & set(saved)
    assert parts.backward is not None
    assert "split" in names(parts.backward)


def test_nothing_but_views_runs_twice_and_nothing_is_lost() -> None:
    joint = joint_graph(Attention(), torch.randn(2, 4, 8), torch.randint(0, 5, (2, 4)))
    parts = partition(joint)
    assert parts.backward is not None
    twice = names(parts.forward) & names(parts.backward)
    views = ("view", "_unsafe_view", "t", "transpose", "split", "getitem", "detach")
    assert {name.rstrip("0123456789").rstrip("_") for name in twice} <= set(views)
    made = names(parts.forward) | names(parts.backward)
    assert {name for name in names(joint.module) - made if not name.startswith("detach")} == set()


def test_inputs_cross_as_they_are() -> None:
    model = Attention()
    arguments = [torch.randn(2, 4, 8), torch.randint(0, 5, (2, 4))]
    joint = joint_graph(model, *arguments)
    inputs = inputs_of(model, joint, arguments)
    parts = partition(joint)
    saved = parts.forward(*inputs)[len(joint.outputs) :]
    crossing = dict(zip(saved_names(parts), saved, strict=True))
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    given = {node.name: value for node, value in zip(placeholders, inputs, strict=False)}
    shared = [name for name in crossing if name in given]
    assert {"norm_weight", "qkv_weight", "head_weight"} <= set(shared)
    assert all(crossing[name] is given[name] for name in shared)


def test_the_smaller_of_a_value_and_what_the_backward_needs_of_it_is_saved_as_a_copy() -> None:
    class FirstRows(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            h = x * x
            return h.sum() + (h[:2] * w).sum()

    joint = joint_graph(FirstRows(), torch.randn(6, 4), torch.randn(2, 4, requires_grad=True))
    parts = partition(joint)
    inputs = [torch.randn(6, 4), torch.randn(2, 4)]
    tangent = torch.randn(())
    expected = joint.module(*inputs, tangent)
    results = parts.forward(*inputs)
    (rows,) = results[1:]
    assert rows.shape == (2, 4)
    assert rows.untyped_storage().nbytes() == rows.nbytes, "the saved rows hold on to all of the value"
    assert all(torch.equal(a, b) for a, b in zip(run(parts, 1, inputs, [tangent]), expected, strict=True))


def test_what_only_the_backward_needs_is_made_where_less_crosses() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x.exp()
            return torch.where(h > 1, h, h * 2)

    parts = partition(joint_graph(Gate(), torch.randn(4, 4, requires_grad=True)))
    assert parts.backward is not None
    sizes = {node.name: tensor(node).nbytes for node in parts.backward.graph.find_nodes(op="placeholder")}
    assert "gt" in sizes, "the mask is a quarter of the value it is made from"


def test_a_forward_only_program_has_no_backward() -> None:
    joint = joint_graph(Attention(), torch.randn(2, 4, 8), torch.randint(0, 5, (2, 4)), with_backward=False)
    parts = partition(joint)
    assert (parts.backward, parts.num_saved) == (None, 0)
    assert names(parts.forward) == names(joint.module)


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.sin() @ b).cos()


def test_collectives_run_once_and_are_waited_on_where_they_run() -> None:
    a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    joint = joint_graph(Product(), a, b)
    told = {
        "mm": Strategy((Shard(1, 2), Shard(0, 2)), (Partial(),)),
        "sin": Strategy((Shard(0, 2),), (Shard(0, 2),)),
    }
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(told))
        local = insert_collectives(joint, mesh)
        parts = partition(local)
    assert parts.backward is not None
    everywhere = collectives(local.module.graph)
    halves = [collectives(module.graph) for module in (parts.forward, parts.backward)]
    assert sorted(c.node.name for half in halves for c in half) == sorted(c.node.name for c in everywhere)
    for module in (parts.forward, parts.backward):
        for found in collectives(module.graph):
            assert ["wait_tensor" in user.name for user in found.node.users] == [True]


def test_a_shard_that_only_the_backward_needs_whole_is_gathered_there() -> None:
    class Matmul(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a @ b).sum()

    joint = joint_graph(Matmul(), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    by_rows = Shard(0, 2)
    told = {
        "input_0": Strategy((), (by_rows,)),
        "mm": Strategy((by_rows, REPLICATE), (by_rows,)),
        "sum_1": Strategy((by_rows,), (Partial(),)),
    }
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(told))
        parts = partition(insert_collectives(joint, mesh))
    assert parts.backward is not None
    assert [c.kind for c in collectives(parts.forward.graph)] == ["all_reduce"]
    assert [c.kind for c in collectives(parts.backward.graph)] == ["all_gather"]
    assert saved_names(parts) == ["input_0"]


def test_what_the_forward_makes_for_the_backward_is_made_in_its_layer() -> None:
    class Norms(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))).sin()
            return x

    parts = partition(joint_graph(Norms(), torch.randn(2, 4, requires_grad=True)))
    targets = [str(node.target) for node in parts.forward.graph.nodes if node.op == "call_function"]
    layer = targets[: len(targets) // 3]
    assert targets == layer * 3
    assert any(is_backward(node) for node in parts.forward.graph.nodes), "no layer makes anything for the backward"


JOINT = """\
def forward(
    input_0: f32[3, 4],
    input_1: f32[2, 4],
    gradient_of_result_0: f32[2, 3],
):

    # (no module)
    t: f32[4, 3] = aten.t(input_0)
    mm: f32[2, 3] = aten.mm(input_1, t)
    relu: f32[2, 3] = aten.relu(mm)
    detach: f32[2, 3] = aten.detach(relu)

    # backward of (no module)
    detach_1: f32[2, 3] = aten.detach(detach)
    threshold_backward: f32[2, 3] = aten.threshold_backward(gradient_of_result_0, detach_1, 0)
    t_1: f32[3, 4] = aten.t(t)
    mm_1: f32[2, 4] = aten.mm(threshold_backward, t_1)

    return (relu, mm_1)
"""

FORWARD = """\
def forward(
    input_0: f32[3, 4],
    input_1: f32[2, 4],
):

    # (no module)
    t: f32[4, 3] = aten.t(input_0)
    mm: f32[2, 3] = aten.mm(input_1, t)
    relu: f32[2, 3] = aten.relu(mm)

    return (relu, input_0, relu)
"""

BACKWARD = """\
def forward(
    input_0: f32[3, 4],
    relu: f32[2, 3],
    gradient_of_result_0: f32[2, 3],
):

    # (no module)
    detach: f32[2, 3] = aten.detach(relu)

    # backward of (no module)
    detach_1: f32[2, 3] = aten.detach(detach)
    threshold_backward: f32[2, 3] = aten.threshold_backward(gradient_of_result_0, detach_1, 0)

    # (no module)
    t: f32[4, 3] = aten.t(input_0)

    # backward of (no module)
    t_1: f32[3, 4] = aten.t(t)
    mm_1: f32[2, 4] = aten.mm(threshold_backward, t_1)

    return (mm_1,)
"""


def test_before_and_after() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.relu(x @ w.t())

    joint = joint_graph(Gate(), torch.randn(2, 4, requires_grad=True), torch.randn(3, 4))
    parts = partition(joint)
    assert parts.backward is not None
    assert format_graph(joint.module) == JOINT
    assert format_graph(parts.forward) == FORWARD
    assert format_graph(parts.backward) == BACKWARD
