"""Graphs that sleep communicate, give results of the right shapes, and take the time that they are told."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from fxpar.lowering import lower
from tests.lowering.graphs import traced


def test_results_have_the_shapes_and_strides_of_what_is_not_computed() -> None:
    def function(x: Tensor) -> list[Tensor | None]:
        return [x.t() @ x, None, x, x.t().exp()]

    x = torch.randn(2, 3)
    product, nothing, same, view = lower("sleep")(traced(function, x))(x)
    assert product.shape == (3, 3) and nothing is None and same is x
    assert view.stride() == x.t().exp().stride()


def test_a_graph_takes_what_its_nodes_take_together() -> None:
    graph = traced(lambda x: [(x @ x).exp()], torch.randn(2, 2))
    run = lower("sleep", lambda node: 20e3 if node.op == "call_function" else 0.0)(graph)
    start = time.monotonic()
    run(torch.randn(2, 2))
    assert time.monotonic() - start >= 0.04, "two nodes of 20 ms"
