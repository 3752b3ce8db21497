"""Temporaries are counted from where they are made to their last use; what Inductor fuses is never made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar._torch.distributed import c10d_functional
from fxpar.ir.node_meta import Communication, set_communication
from fxpar.passes.memory.live_memory import peak_live_bytes
from tests.support.allocated_bytes import peak_allocated_bytes

BYTES = 64 * 64 * 4
"""Of each operand here."""


def traced(function: Callable[..., Any], *operands: Tensor) -> fx.GraphModule:
    graph: fx.GraphModule = make_fx(function, tracing_mode="fake")(*operands)
    return graph


def chain(x: Tensor, w: Tensor) -> list[Tensor]:
    return [((x @ w).relu() * 2).exp() @ w]


def attention(x: Tensor, w: Tensor) -> list[Tensor]:
    probabilities = torch.softmax(x @ w, -1)
    return [probabilities @ x, probabilities]


def norm(x: Tensor, w: Tensor) -> list[Tensor]:
    mean = x.view(32, 128).mean(-1)
    return [(x.view(32, 128) - mean[:, None]).view(64, 64).t() @ w]


def forks(x: Tensor, w: Tensor) -> list[Tensor]:
    first = x @ w
    gate, up = (first + 1).sigmoid(), first * 3
    return [(gate * up) @ w]


@pytest.mark.parametrize("function", [chain, attention, norm, forks])
def test_unfused_values_take_what_running_the_graph_allocates(function: Callable[..., Any]) -> None:
    operands = torch.randn(64, 64), torch.randn(64, 64)
    graph = traced(function, *operands)
    scalars = 100
    assert peak_live_bytes(graph.graph) == pytest.approx(peak_allocated_bytes(lambda: graph(*operands)), abs=scalars)


@pytest.mark.parametrize(
    ("function", "unfused", "fused"),
    [
        # A product, then relu, *2 and exp in its place as they are fed to the next product.
        (chain, 2, 2),
        (lambda x, w: [x.cos().exp().sin()], 2, 1),
        # Both factors of the product are computed inside it, of `first`, in whose place it is written.
        (forks, 3, 2),
        (lambda x, w: [(x.exp() + w).sum()], 2, 0),
        # What is expensive is computed once for both users; the last of them writes in its place.
        (lambda x, w: [(y := x.exp()) + 1, y * 2], 3, 2),
    ],
)
def test_what_is_fused_takes_nothing(function: Callable[..., Any], unfused: int, fused: int) -> None:
    graph = traced(function, torch.randn(64, 64), torch.randn(64, 64))
    assert peak_live_bytes(graph.graph) // BYTES == unfused
    assert peak_live_bytes(graph.graph, fuses=True) // BYTES == fused


def test_a_collective_holds_what_it_was_given_until_it_is_waited_for() -> None:
    def reduced(x: Tensor, w: Tensor) -> list[Tensor]:
        return [wait_tensor(all_reduce(factor @ w, "sum", "anywhere")) for factor in (x, w, x, w)]

    wait_tensor, all_reduce = c10d_functional.wait_tensor, c10d_functional.all_reduce
    graph = traced(reduced, torch.randn(64, 64), torch.randn(64, 64))
    for node in graph.graph.find_nodes(op="call_function", target=all_reduce.default):
        set_communication(node, Communication("all_reduce", "x", BYTES))
    # Four results, and the product that the last of them is the sum of.
    assert peak_live_bytes(graph.graph) // BYTES == 5
