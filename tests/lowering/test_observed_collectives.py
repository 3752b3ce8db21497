"""Collectives in graphs that run can be observed, by kind and axis; nobody who observes changes a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar._torch.lazy_graph_module import code_of
from fxpar.ir.node_meta import Communication, set_awaited, set_communication
from fxpar.lowering.observed_collectives import observed, observing_collectives, with_observed_collectives


def doubled(value: torch.Tensor) -> torch.Tensor:
    """A collective of two ranks that hold the same."""
    return 2 * value


def graph_with_a_collective() -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("value")
    started = graph.call_function(doubled, (value,))
    set_communication(started, Communication("all_reduce", "x", 8))
    waited = graph.call_function(c10d_functional.wait_tensor.default, (started,))
    set_awaited(waited, started)
    graph.output((graph.call_function(torch.neg, (waited,)),))
    return fx.GraphModule({}, graph)


def test_starts_and_waits_are_observed_with_their_axis() -> None:
    run = code_of(with_observed_collectives(graph_with_a_collective()))
    labels: list[str] = []

    def observe(label: str, call: Callable[[], Any]) -> Any:
        labels.append(label)
        return call()

    given = torch.tensor([1.0, 3.0])
    with observing_collectives(observe):
        (found,) = run(given)
    assert labels == ["all_reduce over x", "wait for all_reduce over x"]
    (alone,) = run(given)
    assert labels == ["all_reduce over x", "wait for all_reduce over x"], "nobody observes any more"
    assert torch.equal(found, alone) and torch.equal(found, torch.tensor([-2.0, -6.0]))


def test_the_code_says_what_is_observed() -> None:
    code = with_observed_collectives(graph_with_a_collective()).code
    assert "observed_all_reduce_over_x(value)" in code
    assert "observed_wait_for_all_reduce_over_x(" in code


def test_a_graph_without_collectives_is_left_as_it_is() -> None:
    module = fx.symbolic_trace(torch.nn.ReLU())
    assert with_observed_collectives(module) is module


def test_several_observe_one_inside_the_other() -> None:
    order: list[str] = []

    def observer(name: str) -> Callable[[str, Callable[[], Any]], Any]:
        def observe(label: str, call: Callable[[], Any]) -> Any:
            order.append(f"{name} begins")
            result = call()
            order.append(f"{name} ends")
            return result

        return observe

    with observing_collectives(observer("inner")), observing_collectives(observer("outer")):
        assert observed("a sum", sum, [1, 2]) == 3
    assert order == ["outer begins", "inner begins", "inner ends", "outer ends"]
