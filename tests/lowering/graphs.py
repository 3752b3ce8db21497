"""Local graphs for the tests of lowerings, and the values to run them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar._torch.compiler import FakeTensorMode, make_fx
from fxpar.ir.node_meta import value
from fxpar.lowering import inductor
from fxpar.lowering.kept_code import Source
from fxpar.passes.partition import partition
from tests.support.joint_graphs import joint_graph


@dataclass(frozen=True, slots=True)
class Case:
    """A graph, the inputs that it is called with, and what it returns for them."""

    graph: fx.GraphModule
    inputs: Sequence[Tensor]
    expected: Sequence[Any]


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The ATen graph of `function`, nothing decomposed."""
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        graph: fx.GraphModule = make_fx(function)(*map(mode.from_tensor, inputs))
    return graph


def note_generated() -> list[fx.GraphModule]:
    """A list that gets each region for which Inductor generates code in this process, from now on."""
    generated: list[fx.GraphModule] = []
    generate = inductor._generate

    def noted(source: Source, *, caches: bool) -> Any:
        generated.append(source.region)
        return generate(source, caches=caches)

    inductor._generate = noted
    return generated


def traced_module(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The ATen graph of a module's forward, whose parameters enter in front of `inputs`."""
    names, parameters = zip(*module.named_parameters(), strict=True)

    def function(*values: Tensor) -> Any:
        given = dict(zip(names, values[: len(names)], strict=True))
        return torch.func.functional_call(module, given, values[len(names) :])

    return traced(function, *parameters, *inputs)


def forward_and_backward(model: nn.Module, *arguments: Tensor, **keywords: Tensor) -> Iterator[Case]:
    """The two graphs of a model that returns its loss, with the values of one step."""
    joint = joint_graph(model, *arguments, **keywords)
    parts = partition(joint)
    assert parts.backward is not None
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    given = iter([*arguments, *keywords.values()])
    inputs = [named[port.name].detach() if port.name in named else next(given) for port in joint.inputs]
    forward = Case(parts.forward, inputs, interpret(parts.forward, inputs))
    yield forward
    tangents = [torch.ones_like(forward.expected[joint.outputs.index(port)]) for port in joint.tangents]
    inputs = [*forward.expected[len(joint.outputs) :], *tangents]
    yield Case(parts.backward, inputs, interpret(parts.backward, inputs))


def interpret(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Sequence[Any]:
    """What the graph returns, op by op."""
    with torch.no_grad():
        results: Sequence[Any] = fx.Interpreter(graph).run(*inputs)
    return results


def strides(graph: fx.GraphModule) -> list[tuple[int, ...] | None]:
    """The strides that the graph says its results have."""
    return [None if node is None else value(node).stride() for node in graph.graph.output_node().args[0]]
