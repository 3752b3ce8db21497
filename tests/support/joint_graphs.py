"""Joint graphs of whole models, for tests of the passes that work on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxpar.ir.markers  # noqa: F401  registers the ops that stage graphs may hold
from fxpar._torch.dynamo import change_tracing
from fxpar.ir.flex_attention import flex_attention_in_one_graph, hold_flex_graphs
from fxpar.ir.inline_checkpoints import inline_checkpoints
from fxpar.ir.stage import JointGraph, Port, PortKind, StageGraph
from fxpar.passes.trace_joint import trace_joint


def joint_graph(model: nn.Module, *args: Any, with_backward: bool = True, **kwargs: Any) -> JointGraph:
    """The joint graph of a model as one stage; `model` may lie on the meta device if its arguments do, too."""
    return trace_joint(stage_graph(model, args, kwargs), with_backward=with_backward)


def stage_graph(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StageGraph:
    """What Dynamo captures of `model`, with every parameter, buffer and argument as a port."""
    captured: list[tuple[fx.GraphModule, list[Tensor]]] = []

    def capture(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        captured.append((module, inputs))
        return module.forward

    change_tracing()
    torch.compiler.reset()
    with flex_attention_in_one_graph():
        torch.compile(model, backend=capture, fullgraph=True, dynamic=False)(*args, **kwargs)
    ((module, inputs),) = captured
    hold_flex_graphs(module)
    inline_checkpoints(module)
    names = {id(p): Port(PortKind.PARAMETER, name) for name, p in model.named_parameters()}
    names |= {id(b): Port(PortKind.BUFFER, name) for name, b in model.named_buffers()}
    ports = tuple(names.get(id(value), Port(PortKind.INPUT, str(i))) for i, value in enumerate(inputs))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = tuple(Port(PortKind.RESULT, str(i)) for i in range(len(output.args[0])))
    return StageGraph(0, module, ports, results)
