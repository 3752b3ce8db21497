"""Models whose collectives overlap with computation: weights gathered layer by layer, and ops of many shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from fxpar.ir.layout import REPLICATE, Partial, Shard
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.partition import partition
from fxpar.rules.rule import Strategy
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.placements import Choose, lay_out

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
