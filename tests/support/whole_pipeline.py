"""Run the graph of a whole pipeline in one process, on whole values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from fxpar.ir.node_meta import known_value
from fxpar.ir.random import RANDOM_STATE, random_state
from fxpar.ir.stage import Port, PortKind
from fxpar.passes.stages.pipeline_graph import StageCall
from fxpar.resharding.pipeline import Pipeline
from tests.support.logical_stage import LogicalBackward, LogicalForward


def run_pipeline(
    pipeline: Pipeline, model: nn.Module, batch: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
    """Results, gradients by name, and new buffers of a microbatch; the model has one buffer at most."""
    known = {Port(PortKind.PARAMETER, name): parameter.detach() for name, parameter in model.named_parameters()}
    known |= {Port(PortKind.INPUT, str(i)): value for i, value in enumerate(batch)}
    known[RANDOM_STATE] = random_state(5, 0, 0, 1)
    by_name = {port.identifier: value for port, value in known.items()}
    by_name["gradient_of_result_0"] = torch.ones((), dtype=next(model.parameters()).dtype)
    count = next(model.buffers(), None)
    arguments = []
    for node in pipeline.module.graph.find_nodes(op="placeholder"):
        like = known_value(node)
        arguments.append({p: known.get(p, count) for p in like} if isinstance(like, dict) else by_name[node.name])
    results, tied, own, buffers = _running(pipeline)(*arguments)
    gradients = {port.name: gradient for found in own for port, gradient in found.items()}
    return list(results), gradients | tied, [buffer for found in buffers for buffer in found.values()]


def _running(pipeline: Pipeline) -> fx.GraphModule:
    """The graph of the pipeline with stages that run in the place of those that are only shown."""
    root = nn.Module()
    for name, call in pipeline.module.named_children():
        assert isinstance(call, StageCall)
        runs = LogicalBackward if call.is_backward else LogicalForward
        root.add_module(name, runs(call.joint, call.apart))
    return fx.GraphModule(root, pipeline.module.graph)
