"""A lowering for measuring communication: it runs the collectives of a graph, and sleeps in place of computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxpar._torch.distributed import c10d_functional, process_group_named
from fxpar.graph.extract import returned
from fxpar.ir.node_meta import communication, fused, value
from fxpar.ir.strides import unfilled_like
from fxpar.lowering.cpu_collectives import collectives_of, replace_cpu_collectives

ComputeTime: TypeAlias = Callable[[fx.Node], float]
"""The microseconds that a node computes."""


@dataclass(frozen=True, slots=True)
class SleepingLowering:
    """Makes many ranks on few processors take the time that they would take on processors of their own.

    Every value that no collective returns is zeros, so all results are meaningless.
    """

    compute_us: ComputeTime

    def __call__(self, graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
        """See `Lowering`."""
        return _Sleeper(graph, self.compute_us)


@dataclass(frozen=True, slots=True)
class _Call:
    """Sleep for `pending_us`, then call `run` with the arguments of `node`. `waits`: the call may take any time."""

    pending_us: float
    node: fx.Node
    run: Callable[..., Any]
    waits: bool


class _Sleeper:
    """Runs the collectives of a graph in order, and sleeps as long as the ops before each would compute."""

    def __init__(self, graph: fx.GraphModule, compute_us: ComputeTime) -> None:
        self._placeholders = graph.graph.find_nodes(op="placeholder")
        targets = {node.name: node.target for node in replace_cpu_collectives(graph).graph.nodes}
        self._calls: list[_Call] = []
        pending_us = 0.0
        for node in graph.graph.nodes:
            waits = node.target is c10d_functional.wait_tensor.default
            if communication(node) is not None or waits:
                self._calls.append(_Call(pending_us, node, targets[node.name], waits))
                pending_us = 0.0
            elif fused(node) is not None:
                beside = _FusedCollective(node)
                self._calls.append(_Call(pending_us, node, beside.start, waits=False))
                self._calls.append(_Call(compute_us(node), node, beside.finish, waits=True))
                pending_us = 0.0
            else:
                pending_us += compute_us(node)
        self._last_us = pending_us
        self._given: Sequence[Any] = returned(graph)
        needed = {*self._given, *(operand for call in self._calls for operand in call.node.all_input_nodes)}
        made = {*self._placeholders, *(call.node for call in self._calls)}
        self._zeros = {node: _zeros(node) for node in needed if isinstance(node, fx.Node) and node not in made}

    def __call__(self, *arguments: Tensor) -> list[Any]:
        """The results of the graph, most of them zeros."""
        values = {**self._zeros, **dict(zip(self._placeholders, arguments, strict=True))}
        awake = time.monotonic()
        for call in self._calls:
            awake = _sleep_until(awake + 1e-6 * call.pending_us)
            args, kwargs = fx.map_arg((call.node.args, call.node.kwargs), values.__getitem__)
            values[call.node] = call.run(*args, **kwargs)
            awake = max(awake, time.monotonic()) if call.waits else awake
        _sleep_until(awake + 1e-6 * self._last_us)
        return [values[node] if isinstance(node, fx.Node) else node for node in self._given]


class _FusedCollective:
    """The collective of a fused op, which runs during the sleep for its matmuls."""

    def __init__(self, node: fx.Node) -> None:
        done, group = fused(node), node.args[-1]
        assert done is not None and isinstance(group, str), f"{node} is no fused op"
        self._kind, self._group, self._num_bytes = done.kind, group, done.num_bytes
        self._result = _zeros(node)
        self._started: Tensor | None = None

    def start(self, *args: Any) -> None:
        """Start a collective that sends as many bytes as the op would; takes the op's arguments."""
        group = process_group_named(self._group)
        parts, own = group.size(), collectives_of(group, "cpu")
        rows = max(1, self._num_bytes // torch.float32.itemsize // parts)
        match self._kind:
            case "all_gather":
                self._started = own.all_gather(torch.zeros(rows))
            case "reduce_scatter":
                self._started = own.reduce_scatter(torch.zeros(parts * rows), "sum")
            case _:
                self._started = own.all_reduce(torch.zeros(parts * rows), "sum")

    def finish(self, *args: Any) -> Any:
        """Wait for it; returns zeros in place of the op's result (None in place of a list)."""
        c10d_functional.wait_tensor(self._started)
        return self._result


def _sleep_until(moment: float) -> float:
    """Sleep until `moment` and return it: the next sleep counts from there, so that oversleeping does not add up."""
    time.sleep(max(0.0, moment - time.monotonic()))
    return moment


def _zeros(node: fx.Node) -> Any:
    fake = value(node)
    if not isinstance(fake, Tensor):
        return None
    return unfilled_like(fake).zero_()
