"""Local graphs: what they look like, and that all ranks together compute what the logical graph does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.dump import format_graph
from fxpar.ir.layout import REPLICATE, Partial, Shard
from fxpar.ir.node_meta import is_backward
from fxpar.ir.stage import JointGraph
from fxpar.passes.insert_collectives import collectives, insert_collectives
from fxpar.rules import rule_for
from fxpar.rules.rule import Strategy
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs
from tests.support.placements import as_told, at_random, lay_out


class Mlp(nn.Module):
    """Two matrices, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8))
        self.down = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x @ self.up) @ self.down


class Block(nn.Module):
    """A normalised attention and a loss over a vocabulary that three does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 6, 3, 2, 6).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        x = x + mixed.transpose(1, 2).reshape(2, 6, 12)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


COLUMNS = Strategy((REPLICATE, Shard(1, 2)), (Shard(1, 2),))
ROWS = Strategy((Shard(1, 2), Shard(0, 2)), (Partial(),))
MEGATRON = {
    "up": Strategy((), (Shard(1, 2),)),
    "down": Strategy((), (Shard(0, 2),)),
    "mm": COLUMNS,
    "relu": Strategy((Shard(1, 2),), (Shard(1, 2),)),
    "mm_1": ROWS,
}


@pytest.fixture(scope="module")
def mlp() -> JointGraph:
    return joint_graph(Mlp(), torch.randn(6, 4), with_backward=False)


@pytest.fixture(scope="module")
def block() -> JointGraph:
    return joint_graph(Block().double(), torch.randn(2, 6, 12).double(), torch.zeros(2, 6, dtype=torch.long))


def test_a_partial_sum_is_reduced_where_it_is_needed_whole(mlp: JointGraph) -> None:
    with fake_mesh(x=2) as mesh:
        lay_out(mlp, mesh, as_told(MEGATRON))
        after = insert_collectives(mlp, mesh)
        group = mesh.group("x").group_name
    assert (
        format_graph(mlp.module)
        == """\
def forward(
    up: f32[4, 2@x*4],
    input_1: f32[6, 4],
    down: f32[2@x*4, 4],
):

    # (no module)
    mm: f32[6, 2@x*4] = aten.mm(input_1, up)
    relu: f32[6, 2@x*4] = aten.relu(mm)
    mm_1: f32[6, 4] = aten.mm(relu, down)  # partial sum over x

    return (mm_1,)
"""
    )
    assert (
        format_graph(after.module).replace(f"'{group}'", "GROUP")
        == """\
# forward: 1 all_reduce over x, 96 bytes together
def forward(
    up: f32[4, 4],  # of [4, 2@x*4]
    input_1: f32[6, 4],
    down: f32[4, 4],  # of [2@x*4, 4]
):

    # (no module)
    mm: f32[6, 4] = aten.mm(input_1, up)  # of [6, 2@x*4]
    relu: f32[6, 4] = aten.relu(mm)  # of [6, 2@x*4]
    mm_1: f32[6, 4] = aten.mm(relu, down)  # partial sum over x
    all_reduce: f32[6, 4] = _c10d_functional.all_reduce(mm_1, 'sum', GROUP)  # over x, 96 bytes
    wait_tensor: f32[6, 4] = _c10d_functional.wait_tensor(all_reduce)

    return (wait_tensor,)
"""
    )


@pytest.mark.parametrize(
    ("seed", "sizes"), [(0, {"x": 2}), (1, {"x": 3}), (2, {"x": 3}), (3, {"y": 2, "x": 2})], ids=str
)
def test_all_ranks_together_compute_the_joint_graph_however_it_is_laid_out(
    block: JointGraph, seed: int, sizes: dict[str, int]
) -> None:
    inputs = inputs_of(block, seed)
    with fake_mesh(**sizes) as mesh:
        lay_out(block, mesh, at_random(seed))
        found = run_local_graphs(block, mesh, inputs)
    check_pieces(block, mesh, found, block.module(*inputs))


def test_consumers_with_one_need_share_one_move() -> None:
    class Twice(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            product = a @ b
            return product.sin() + product.cos()

    joint = joint_graph(Twice(), torch.randn(2, 4), torch.randn(4, 2), with_backward=False)
    columns_by_rows = Strategy((Shard(1, 2), Shard(0, 2)), (Partial(),))
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told({"mm": columns_by_rows}))
        (found,) = collectives(insert_collectives(joint, mesh).module.graph)
    assert (found.kind, found.axis, found.num_bytes) == ("all_reduce", "x", 2 * 2 * 4)


def test_a_whole_value_that_is_there_is_sliced_rather_than_reduced_again() -> None:
    class Twice(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            product = a @ b
            return product.sin(), product.cos()

    joint = joint_graph(Twice(), torch.randn(2, 4), torch.randn(4, 2), with_backward=False)
    told = {
        "mm": Strategy((Shard(1, 2), Shard(0, 2)), (Partial(),)),
        "cos": Strategy((Shard(1, 2),), (Shard(1, 2),)),
    }
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(told))
        found = collectives(insert_collectives(joint, mesh).module.graph)
    assert [c.kind for c in found] == ["all_reduce", "all_gather"]  # the second for the output, which is replicated


def test_a_move_for_the_backward_alone_belongs_to_the_backward() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a @ b

    a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    joint = joint_graph(Product(), a, b)
    told = {
        "input_0": Strategy((), (Shard(0, 2),)),
        "mm": Strategy((Shard(0, 2), REPLICATE), (Shard(0, 2),)),
    }
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(told))
        found = collectives(insert_collectives(joint, mesh).module.graph)
    assert [(c.kind, is_backward(c.node)) for c in found] == [("all_gather", False), ("all_gather", True)]


def test_an_op_without_a_rule_runs_whole() -> None:
    class Trace(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return torch.trace(a)

    assert rule_for(torch.ops.aten.trace.default) is None
    joint = joint_graph(Trace(), torch.randn(4, 4), with_backward=False)
    inputs = inputs_of(joint, 0)
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told({"input_0": Strategy((), (Shard(0, 2),))}))
        found = run_local_graphs(joint, mesh, inputs)
    check_pieces(joint, mesh, found, joint.module(*inputs))


def test_slices_of_the_statistics_of_a_norm_are_dense() -> None:
    """The CPU kernel of layer_norm's backward reads its mean and rstd as if they were, and says nothing if not."""
    joint = joint_graph(nn.LayerNorm(8).double(), torch.randn(4, 6, 8, requires_grad=True, dtype=torch.double))
    backward = next(node for node in joint.module.graph.nodes if "layer_norm_backward" in node.name)
    by_sequence = Shard(1, 2)
    told = {
        backward.name: Strategy(
            (by_sequence, by_sequence, by_sequence, by_sequence, REPLICATE, REPLICATE),
            (by_sequence, Partial(), Partial()),
        )
    }
    inputs = inputs_of(joint, 0)
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(told))
        found = run_local_graphs(joint, mesh, inputs)
    check_pieces(joint, mesh, found, joint.module(*inputs))


def test_a_hint_leaves_no_op_behind() -> None:
    class Hinted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fxpar.shard(x.sin(), ("x", None)).cos()

    joint = joint_graph(Hinted(), torch.randn(4, 4, dtype=torch.double, requires_grad=True))
    by_rows = Strategy((Shard(0, 2),), (Shard(0, 2),))
    hints = [node.name for node in joint.module.graph.nodes if "fxpar" in str(node.target)]
    inputs = inputs_of(joint, 0)
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(dict.fromkeys(hints, by_rows)))
        local = insert_collectives(joint, mesh)
        found = run_local_graphs(joint, mesh, inputs)
    assert len(hints) == 2, "one in the forward, one for the gradient"
    assert not [node for node in local.module.graph.nodes if "fxpar" in str(node.target)]
    check_pieces(joint, mesh, found, joint.module(*inputs))


class Asserting(Mlp):
    """Assertions: on a value that is sharded, and those of `one_hot`."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.one_hot(x, 4).to(self.up.dtype) @ self.up
        torch._assert_async((hidden < 1e6).all(), "hidden values must be small")
        return functional.relu(hidden) @ self.down


def test_an_op_without_a_result_runs_on_every_rank_on_whole_operands() -> None:
    joint = joint_graph(Asserting().double(), torch.zeros(6, dtype=torch.long))
    values = [v % 4 if v.dtype == torch.long else v for v in inputs_of(joint, seed=0)]
    large = [v if v.dtype == torch.long else 1e7 * v.abs() for v in values]
    split = {"up": Strategy((), (Shard(1, 2),)), "mm": COLUMNS, "lt_1": Strategy((Shard(1, 2),), (Shard(1, 2),))}
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(split))
        local = insert_collectives(joint, mesh).module.graph
        assert sum(node.target is torch.ops.aten._assert_async.msg for node in local.nodes) == 3
        check_pieces(joint, mesh, run_local_graphs(joint, mesh, values), list(joint.module(*values)))
        with pytest.raises(RuntimeError, match="hidden values must be small"):
            run_local_graphs(joint, mesh, large)
