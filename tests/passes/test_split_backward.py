"""Forward, input gradients and weight gradients together are the joint graph, and I does nothing that can wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.lowering import lower
from fxpar.stage import JointGraph
from tests.halves import decomposed, joints_of, run_parts, split
from tests.local_graphs import inputs_of
from tests.small_models import GPT, hf_gpt2, hf_llama


def check_bits(joint: JointGraph) -> None:
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


def gpt() -> tuple[nn.Module, Any, list[str]]:
    tokens = torch.randint(96, (2, 12))
    return GPT(layers=3), (tokens, tokens), ["blocks.1.up", "blocks.2"]


def gpt2() -> tuple[nn.Module, Any, list[str]]:
    tokens = torch.randint(96, (2, 12))
    return hf_gpt2(), {"input_ids": tokens, "labels": tokens}, ["transformer.h.1"]


def llama() -> tuple[nn.Module, Any, list[str]]:
    tokens = torch.randint(96, (2, 12))
    return hf_llama(), {"input_ids": tokens, "labels": tokens}, ["model.layers.1"]


@pytest.mark.parametrize("make", [gpt, gpt2, llama])
def test_the_parts_give_the_very_bits_of_the_joint_graph(make: Callable[[], tuple[nn.Module, Any, list[str]]]) -> None:
    for joint in joints_of(*make()):
        check_bits(joint)
        check_bits(decomposed(joint))
