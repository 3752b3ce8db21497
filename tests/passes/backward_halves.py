"""Models whose backward is split in two halves: these are checked bit for bit, and their ops are counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar.ir.op_predicates import is_free_to_recompute
from fxpar.ir.stage import JointGraph
from fxpar.lowering import lower
from fxpar.passes.split_backward import SplitBackward
from tests.support.halves import run_parts, split
from tests.support.local_graphs import inputs_of
from tests.support.small_models import GPT

Made = tuple[nn.Module, Any, list[str]]


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


def gpt() -> Made:
    tokens = torch.randint(96, (2, 12))
    return GPT(layers=3), (tokens, tokens), ["blocks.1.up", "blocks.2"]


class Chain(nn.Sequential):
    """Modules one after another, then a sum as the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def linears() -> Chain:
    """Four matrix products and biases."""
    return Chain(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)))
