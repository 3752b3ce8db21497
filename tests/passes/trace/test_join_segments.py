"""A stage traced in segments is, op for op, the stage traced as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.graph.extract import returned
from fxpar.ir.node_meta import is_backward, known_value, module_path
from fxpar.ir.stage import JointGraph, StageGraph
from fxpar.passes import trace_joint as trace_joint_file
from fxpar.passes.trace.cut_layers import cut_layers
from fxpar.passes.trace.segment import segments
from fxpar.passes.trace.trace_whole import trace_whole
from fxpar.passes.trace_joint import Traced, trace_joint
from tests.support.joint_graphs import stage_graph
from tests.support.small_models import GPT, Block, hf_gemma, hf_llama, labelled, tokens

LAYERS = 6


class Chain(nn.Module):
    """Equal layers with buffers that change and dropout; variants of it differ in what the layers share."""

    def __init__(self, *, tied: bool = False, frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._layer() for _ in range(2 * LAYERS))
        for layer in self.layers[1:]:
            if tied:
                layer[0].weight = self.layers[0][0].weight
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    @staticmethod
    def _layer() -> nn.Sequential:
        return nn.Sequential(
            *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.1)),
            *(nn.GELU(), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Skips(nn.Module):
    """All layers use one value from before them, and values between layers are used again after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(24, 4, True) for _ in range(LAYERS))
        self.condition = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        condition, values = self.condition(x), []
        for block in self.blocks:
            x = block(x) + condition
            values.append(x)
        return (x * values[1] * values[3] + condition).square().mean()


class OneBlock(nn.Module):
    """One layer that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(24, 4, True), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = self.block(x)
        return self.last(x).square().mean()


def checkpointed_llama() -> nn.Module:
    model = hf_llama(layers=LAYERS)
    model.gradient_checkpointing_enable()
    return model.train()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt": (lambda: GPT(layers=LAYERS), lambda: (tokens(), tokens())),
    "llama": (lambda: hf_llama(layers=LAYERS), labelled),
    "checkpointed llama": (checkpointed_llama, labelled),
    "gemma": (lambda: hf_gemma(layers=8), labelled),
    "chain": (Chain, lambda: (torch.randn(4, 8),)),
    "tied chain": (lambda: Chain(tied=True), lambda: (torch.randn(4, 8),)),
    "half frozen chain": (lambda: Chain(frozen=3), lambda: (torch.randn(4, 8),)),
    "skips": (Skips, lambda: (torch.randn(2, 12, 24),)),
    "one block": (OneBlock, lambda: (torch.randn(2, 12, 24),)),
}


@cache
def stage_of(name: str) -> StageGraph:
    make, make_inputs = MODELS[name]
    inputs = make_inputs()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return stage_graph(make(), args, kwargs)


def computations(joint: JointGraph) -> list[str]:
    """Each returned value as the expression of the inputs that computes it, hashed."""
    hashes: dict[fx.Node, str] = {}
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            hashes[node] = node.name
        elif node.op == "call_function":
            given = fx.map_arg((node.args, node.kwargs), lambda operand: hashes.get(operand, operand))
            hashes[node] = str(hash(f"{node.target}{given}"))
    return [hashes[node] for node in returned(joint.module)]


def origins(joint: JointGraph) -> Counter[tuple[Any, ...]]:
    """Of each op: the module that it belongs to, its direction, and the type of its result."""
    return Counter(
        (str(node.target), module_path(node), is_backward(node), str(known_value(node)))
        for node in joint.module.graph.nodes
        if node.op == "call_function"
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_backward", [True, False])
def test_segments_compute_what_the_whole_computes_op_for_op(name: str, with_backward: bool) -> None:
    stage = stage_of(name)
    whole, joint = trace_whole(stage, with_backward=with_backward), trace_joint(stage, with_backward=with_backward)
    assert (joint.inputs, joint.outputs) == (whole.inputs, whole.outputs)
    assert (joint.tangents, joint.gradients) == (whole.tangents, whole.gradients)
    assert computations(joint) == computations(whole)
    assert origins(joint) == origins(whole)


def num_ops(stage: StageGraph) -> int:
    """The operations that compute, besides those that pass values on."""
    border = torch.ops.fxpar.border.default
    return sum(node.op == "call_function" and node.target is not border for node in stage.module.graph.nodes)


@pytest.mark.parametrize("name", MODELS)
def test_equal_layers_are_traced_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, traced_ops = stage_of(name), []

    def counted(part: StageGraph, *, with_backward: bool) -> JointGraph:
        traced_ops.append(num_ops(part))
        return trace_whole(part, with_backward=with_backward)

    monkeypatch.setattr(trace_joint_file, "trace_whole", counted)
    trace_joint(stage, with_backward=True)
    assert sum(traced_ops) < 0.75 * num_ops(stage)


def test_layers_of_another_stage_are_known() -> None:
    known: Traced = {}
    trace_joint(stage_of("gpt"), with_backward=True, known=known)
    kinds = set(known)
    trace_joint(stage_of("gpt"), with_backward=True, known=known)
    assert set(known) == kinds


def test_layers_that_differ_in_a_constant_are_of_different_kinds() -> None:
    model = Chain()
    model.layers[2][6].eps = 1e-3
    stage = stage_graph(model, (torch.randn(4, 8),), {})
    parts = segments(stage, cut_layers(stage.module, with_backward=True), with_backward=True)
    holding = {part.kind for part in parts if any("layers.2." in f"{module_path(node)}." for node in part.nodes)}
    others = {part.kind for part in parts if not any("layers.2." in f"{module_path(node)}." for node in part.nodes)}
    assert holding.isdisjoint(others)
