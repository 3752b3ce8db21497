"""A lowering for measuring communication: it communicates as a graph does, and sleeps where that computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxpar._torch import c10d_functional
from fxpar.annotate import move, tensor, value
from fxpar.lowering.cpu_collectives import replace_cpu_collectives
from fxpar.passes.extract import returned

ComputeTime: TypeAlias = Callable[[fx.Node], float]
"""How many microseconds a node computes."""


@dataclass(frozen=True, slots=True)
class SleepingLowering:
    """Many ranks on few processors so take the time that they would take on processors of their own.

    Whatever a graph does not communicate is zeros, so that all results are meaningless.
    """

    compute_us: ComputeTime

    def __call__(self, graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
        """See `Lowering`."""
        return _Sleeper(graph, self.compute_us)


class _Sleeper:
    """Runs the collectives of a graph, in its order, and sleeps as long as what stands before each would take."""

    def __init__(self, graph: fx.GraphModule, compute_us: ComputeTime) -> None:
        self._placeholders = graph.graph.find_nodes(op="placeholder")
        targets = {node.name: node.target for node in replace_cpu_collectives(graph).graph.nodes}
        self._calls: list[tuple[float, fx.Node, Any]] = []
        pending_us = 0.0
        for node in graph.graph.nodes:
            if move(node) is not None or node.target is c10d_functional.wait_tensor.default:
                self._calls.append((pending_us, node, targets[node.name]))
                pending_us = 0.0
            else:
                pending_us += compute_us(node)
        self._last_us = pending_us
        self._given: Sequence[Any] = returned(graph)
        needed = {*self._given, *(operand for _, node, _ in self._calls for operand in node.all_input_nodes)}
        made = {*self._placeholders, *(node for _, node, _ in self._calls)}
        self._zeros = {node: _zeros(node) for node in needed if isinstance(node, fx.Node) and node not in made}

    def __call__(self, *arguments: Tensor) -> list[Any]:
        """Run it."""
        values = {**self._zeros, **dict(zip(self._placeholders, arguments, strict=True))}
        awake = time.monotonic()
        for pending_us, node, target in self._calls:
            awake = _sleep_until(awake + 1e-6 * pending_us)
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = target(*args, **kwargs)
            awake = max(awake, time.monotonic()) if node.target is c10d_functional.wait_tensor.default else awake
        _sleep_until(awake + 1e-6 * self._last_us)
        return [values[node] if isinstance(node, fx.Node) else node for node in self._given]


def _sleep_until(moment: float) -> float:
    """Sleep until `moment`, from which what follows counts: so whoever oversleeps is not late for ever."""
    time.sleep(max(0.0, moment - time.monotonic()))
    return moment


def _zeros(node: fx.Node) -> Any:
    fake = value(node)
    if not isinstance(fake, Tensor):
        return None
    like = tensor(node)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
