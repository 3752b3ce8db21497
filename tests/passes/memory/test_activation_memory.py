"""The figures of kept memory are the bytes that running the graphs leaves in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.memory.activation_memory import KeptPort, activation_memory
from tests.support.halves import joints_of, split
from tests.support.local_graphs import inputs_of
from tests.support.small_models import GPT, hf_llama


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each distinct storage, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def num_bytes(tensors: Iterable[Tensor], but: Iterable[Tensor]) -> int:
    """The bytes that `tensors` hold in memory that none of `but` holds."""
    others = storages(but)
    return sum(size for address, size in storages(tensors).items() if address not in others)


def sharing(ports: Sequence[Port], values: Sequence[Tensor], kept: Iterable[Tensor]) -> dict[Port, int]:
    """The ports whose value shares its memory with what is `kept`, with the bytes of it."""
    held = storages(kept)
    addresses = [value.untyped_storage().data_ptr() for value in values]
    return {port: held[address] for port, address in zip(ports, addresses, strict=False) if address in held}


def shown(kept: Sequence[KeptPort]) -> dict[Port, int]:
    return {item.port: item.num_bytes for item in kept}


def check(joint: JointGraph) -> None:
    """Run F and I, look at what lies where, and compare with the figures."""
    parts, halves = split(joint)
    found = activation_memory(joint, parts, halves)
    values = inputs_of(joint, seed=2)
    inputs, tangents = values[: len(joint.inputs)], values[len(joint.inputs) :]
    made = parts.forward(*inputs)
    outputs, saved = made[: len(joint.outputs)], made[len(joint.outputs) :]
    by_inputs = halves.inputs(*(saved[i] for i in halves.inputs_saved), *tangents)
    edges = [port for port in joint.gradients if port.kind is PortKind.EDGE]
    carried = by_inputs[len(edges) :]
    until_weights = [*(saved[i] for i in halves.weights_saved), *carried]

    own_saved = [value for value in saved if not storages([value]).keys() & storages(inputs).keys()]
    assert found.saved_bytes == num_bytes(saved, but=inputs)
    assert found.saved_until_inputs_bytes == num_bytes(saved, but=[*inputs, *until_weights])
    assert found.carried_bytes == num_bytes(carried, but=[*inputs, *tangents, *saved])
    results = [value for port, value in zip(joint.outputs, outputs, strict=True) if port.kind is PortKind.RESULT]
    assert found.result_bytes == num_bytes(results, but=[*inputs, *saved])
    received = {port: size for port, size in sharing(joint.inputs, inputs, saved).items() if port.kind is PortKind.EDGE}
    late = sharing(joint.inputs, inputs, until_weights)
    assert shown(found.inputs) == received
    assert {item.port for item in found.inputs if item.until == "W"} == received.keys() & late.keys()
    assert shown(found.outputs) == sharing(joint.outputs, outputs, own_saved)
    assert shown(found.tangents) == sharing(joint.tangents, tangents, carried)
    assert shown(found.gradients) == sharing(edges, by_inputs, carried)


class Views(nn.Module):
    """Saved views of one value, a dropout mask, a part of a value, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        x = functional.dropout(x + self.norm(mixed), 0.25)
        return torch.cat([x[:1] * self.scale, x[1:]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.views, self.last = nn.Linear(8, 8), Views(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(torch.relu(self.views(first)) + first).sum()


def tokens() -> Tensor:
    return torch.randint(96, (2, 12))


@pytest.mark.parametrize(
    ("model", "inputs", "boundaries"),
    [
        pytest.param(GPT(layers=3), (tokens(), tokens()), ["blocks.1.up", "blocks.2"], id="gpt"),
        pytest.param(hf_llama(), {"input_ids": tokens(), "labels": tokens()}, ["model.layers.1"], id="llama"),
        pytest.param(Model(), (torch.randn(4, 6, 8),), ["views", "last"], id="views"),
    ],
)
def test_the_figures_are_the_bytes_of_distinct_storages(model: nn.Module, inputs: Any, boundaries: list[str]) -> None:
    for joint in joints_of(model, inputs, boundaries):
        check(joint)


def test_an_undivided_backward_frees_all_that_was_saved() -> None:
    _, second = joints_of(Model(), (torch.randn(4, 6, 8),), ["views"])
    parts, halves = split(second)
    whole, divided = activation_memory(second, parts), activation_memory(second, parts, halves)
    assert whole.saved_bytes == whole.saved_until_inputs_bytes == divided.saved_bytes
    assert divided.saved_until_weights_bytes > 0
    assert (whole.carried_bytes, whole.tangents, whole.gradients) == (0, (), ())
    assert {item.until for item in whole.inputs} == {"B"}


def test_an_edge_that_weights_need_is_kept_as_received() -> None:
    first, second = joints_of(Model(), (torch.randn(4, 6, 8),), ["views"])
    (received,) = activation_memory(second, *split(second)).inputs
    (sent,) = [port for port in first.outputs if port.kind is PortKind.EDGE]
    assert received == KeptPort(sent, 4 * 6 * 8 * 4, "W")
