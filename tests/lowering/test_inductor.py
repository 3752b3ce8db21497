"""Inductor's code returns what the graph returns, with the graph's strides, and is compiled once on a machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fxpar._torch.distributed import c10d_functional
from fxpar.lowering import lower
from fxpar.world.launch import run_ranks
from tests.lowering.graphs import Case, forward_and_backward, interpret, strides, traced
from tests.support.small_models import GPT, hf_llama

aten = torch.ops.aten


def check(case: Case) -> None:
    """Values as op by op, strides as the graph says, and inputs as they were."""
    before = [tensor.clone() for tensor in case.inputs]
    with torch.no_grad():
        found = lower("inductor")(case.graph)(*case.inputs)
    assert [None if value is None else value.stride() for value in found] == strides(case.graph)
    for value, expected in zip(found, case.expected, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, case.inputs, strict=True))


def case_of(function: Callable[..., Any], *inputs: Tensor) -> Case:
    graph = traced(function, *inputs)
    return Case(graph, inputs, interpret(graph, inputs))


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    tokens = torch.randint(96, (2, 12))
    return GPT(), {"tokens": tokens, "targets": tokens}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    tokens = torch.randint(96, (2, 12))
    return hf_llama(), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("make", [gpt, llama])
def test_forward_and_backward_of_a_model_equal_their_graphs(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
) -> None:
    model, batch = make()
    for case in forward_and_backward(model, **batch):
        check(case)


def test_results_lie_in_memory_as_in_the_graph() -> None:
    def views(x: Tensor, w: Tensor, i: Tensor) -> list[Tensor | None]:
        y = x * 2 + 1
        return [
            *(y, y[:, 2:5], y.transpose(0, 2), y.diagonal(0, 0, 2), aten.unfold(y, 1, 3, 2), y.reshape(48, 4)),
            *(x.sum(1, keepdim=True).expand(6, 8, 4), x.permute(1, 2, 0).sin(), aten.flip(x.permute(2, 0, 1), [0])),
            *((x.reshape(48, 4) @ w.t()).reshape(6, 8, 5).permute(2, 0, 1), aten.embedding(w, i.t())),
            *aten.native_layer_norm(x.transpose(0, 1), [4], None, None, 1e-5),
            *(None, x, w.t(), x[1:3], x.detach(), y, torch.full([3, 4], 1.5)),
        ]

    rows, indices = torch.randn(5, 4), torch.randint(0, 5, (3, 2))
    check(case_of(views, torch.randn(6, 8, 4), rows, indices))
    check(case_of(views, torch.randn(4, 8, 6).transpose(0, 2), rows, indices))


def test_messages_of_assertions_may_have_quotes_and_lines() -> None:
    def asserted(x: Tensor) -> list[Tensor]:
        aten._assert_async.msg(x.max() < 10, 'expected "small" values\nin C:\\data')
        return [x + 1]

    case = case_of(asserted, torch.randn(3))
    for node in case.graph.graph.nodes:
        node.meta.setdefault("val", None)
    check(case)


def test_convolutions_are_not_laid_out_channels_last() -> None:
    def convolve(x: Tensor, *weights: Tensor) -> list[Tensor]:
        results = []
        for weight in weights:
            x = torch.relu(aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
            results.append(x)
        return results

    check(case_of(convolve, torch.randn(2, 8, 10, 10), torch.randn(16, 8, 3, 3) / 9, torch.randn(16, 16, 3, 3) / 12))


def test_a_decomposition_that_would_change_the_memory_order_does_not() -> None:
    x = torch.randn(3, 2, 4).transpose(0, 2)
    case = case_of(lambda x: [aten.upsample_nearest1d.default(x, [6])], x)
    check(case)


def test_random_ops_draw_what_aten_draws() -> None:
    x = torch.randn(100)
    graph = traced(lambda x: aten.native_dropout(x, 0.5, True), x)
    torch.manual_seed(3)
    expected = interpret(graph, [x])
    code = lower("inductor")(graph)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(code(x), expected, strict=True))


def communicate() -> None:
    """Collectives of and around a compiled graph; runs on every rank."""
    group = dist.group.WORLD.group_name
    rows = 2 * dist.get_world_size()

    def collectives(x: Tensor, started: Tensor) -> list[Tensor]:
        size = dist.get_world_size()
        reduced = c10d_functional.all_reduce(x.t() * 2, "sum", group)
        gathered = c10d_functional.all_gather_into_tensor(x, size, group)
        scattered = c10d_functional.reduce_scatter_tensor(x, "sum", size, group)
        done = [c10d_functional.wait_tensor(value) for value in (started, reduced, gathered, scattered)]
        return [*done, done[0] + 1, c10d_functional.all_reduce(x + 3, "sum", group)]

    x = torch.arange(rows * 3.0).view(rows, 3) + dist.get_rank()
    start = partial(c10d_functional.all_reduce, x, "sum", group)
    graph = traced(collectives, x, torch.empty(rows, 3))
    found, expected = lower("inductor")(graph)(x, start()), interpret(graph, [x, start()])
    for results in (found, expected):
        c10d_functional.wait_tensor(results[-1])
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    assert torch.equal(x, torch.arange(rows * 3.0).view(rows, 3) + dist.get_rank())


def test_collectives_run_inside_and_across_compiled_graphs() -> None:
    run_ranks(2, communicate)


def compile_new(constant: float) -> tuple[int, float]:
    """How many compiled graphs came from the cache, and a value; runs on every rank."""
    counters.clear()
    (result,) = lower("inductor")(traced(lambda x: [x * constant], torch.ones(3)))(torch.ones(3))
    return counters["inductor"]["fxgraph_cache_hit"], float(result[0])


def test_ranks_of_one_machine_compile_a_graph_once() -> None:
    constant = time.time()  # a graph that no earlier run has compiled
    results = run_ranks(3, compile_new, constant)
    assert [value for _, value in results] == pytest.approx([constant] * 3)
    assert sorted(hits for hits, _ in results) == [0, 1, 1]
