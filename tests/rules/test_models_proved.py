"""Every ATen op that language models run in training has a rule, and every rule is right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from op_calls import Call, calls_in, different
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.rules import rule_for
from fxpar.rules.prove import prove
from tests.support.joint_graphs import joint_graph
from tests.support.small_models import GPT, hf_gpt2, hf_llama

VOCABULARY, LENGTH = 96, 12

MODELS = {
    "gpt_fused": partial(GPT, fused=True),
    "gpt_separate": partial(GPT, fused=False),
    "gpt_ragged": partial(GPT, vocabulary=VOCABULARY + 1, width=20),
    "gpt_math": GPT,
    "gpt_autocast": GPT,
    "hf_gpt2": hf_gpt2,
    "hf_llama": hf_llama,
}

MODES = {
    "gpt_math": partial(sdpa_kernel, SDPBackend.MATH),
    "gpt_autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


@cache
def training_graph(name: str) -> fx.GraphModule:
    """The decomposed joint graph of a model."""
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    names = ("input_ids", "labels") if name.startswith("hf") else ("tokens", "targets")
    with MODES.get(name, nullcontext)():
        return decompose_for_sharding(joint_graph(MODELS[name](layers=1), **dict.fromkeys(names, tokens)).module)


@cache
def calls() -> Sequence[Call]:
    """The different calls of all these graphs, on random values."""
    torch.manual_seed(0)
    found = []
    for name in MODELS:
        graph = training_graph(name)
        inputs = [_random(node.meta["val"]) for node in graph.graph.find_nodes(op="placeholder")]
        found += calls_in(graph, inputs)
    return list(different(found))


def _random(like: torch.Tensor) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.randint(0, VOCABULARY, like.shape, dtype=like.dtype)
    return torch.randn(like.shape, dtype=like.dtype)


@pytest.mark.parametrize("name", MODELS)
def test_every_op_has_a_rule(name: str) -> None:
    targets = {n.target for n in training_graph(name).graph.nodes if n.op == "call_function"}
    aten_ops = {target for target in targets if isinstance(target, torch._ops.OpOverload)}
    assert {target for target in aten_ops if rule_for(target) is None} == set()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_every_call_is_proved(parts: int) -> None:
    for call in calls():
        prove(*call, parts)
