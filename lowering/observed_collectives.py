"""Collectives that a step may be watched at: by profilers, and by who records when they keep a rank from computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.graph.extract import copied
from fxpar.ir.node_meta import awaited, communication, fused

P = ParamSpec("P")
T = TypeVar("T")

ObserveCollective: TypeAlias = Callable[[str, Callable[[], Any]], Any]
"""Runs what starts a collective or waits for one by calling its last argument; returns what that returns.

The first argument says which, such as "all_reduce over x" or "wait for all_reduce over x".
"""

WAIT_FOR = "wait for "
"""How the labels begin of what waits."""

_observers: list[ObserveCollective] = []


@contextmanager
def observing_collectives(observe: ObserveCollective) -> Iterator[None]:
    """Within, all collectives of this process's steps run by `observe`."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def observed(label: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of the call, which runs by those who observe collectives, if there are any."""
    if not _observers:
        return function(*args, **kwargs)
    run: Callable[[], T] = partial(function, *args, **kwargs)
    for observe in _observers:
        run = partial(observe, label, run)
    return run()


def with_observed_collectives(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph`, or a copy whose collectives, waits for them, and fused ops can be observed; for graphs that are to run.

    Before: started = all_reduce(partial, "sum", "1");                whole = wait_tensor(started)
    After:  started = observed_all_reduce_over_x(partial, "sum", "1"); whole = observed_wait_for_all_reduce_over_x(...)
    """
    labels = {node.name: label for node in graph.graph.nodes if (label := _label(node))}
    if not labels:
        return graph
    replaced = copied(graph.graph.nodes)
    for node in replaced.nodes:
        if node.name in labels:
            node.target = _observable(labels[node.name], node.target)
    return lazy_graph_module(graph, replaced)


def _label(node: fx.Node) -> str:
    """What profiles call the node; empty if it has to do with no collective."""
    if node.target is c10d_functional.wait_tensor.default:
        started = awaited(node)
        return f"{WAIT_FOR}{started.kind} over {started.axis}" if started else f"{WAIT_FOR}a collective"
    if (done := communication(node)) is not None:
        return f"{done.kind} over {done.axis}"
    return f"{done.kind} over {done.axis}, fused" if (done := fused(node)) is not None else ""


def _observable(label: str, target: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return observed(label, target, *args, **kwargs)

    call.__name__ = f"observed_{label.replace(', ', '_').replace(' ', '_')}"  # by which the graph's code calls it
    return call
