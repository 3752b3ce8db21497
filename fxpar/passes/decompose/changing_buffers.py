"""Find buffers that change with each microbatch, and that the loss reads: later microbatches see what others left."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import fx

from fxpar.graph.buffers_of_step import buffers_of_step
from fxpar.graph.extract import returned
from fxpar.graph.min_cut import closure, users
from fxpar.ir.stage import JointGraph, Port, PortKind


def changing_buffer(stages: Sequence[JointGraph], wanted: Container[Port]) -> fx.Node | None:
    """What computes the new value of such a buffer, if one of the `wanted` results depends on the value before."""
    reached: dict[Port, fx.Node] = {}
    for stage in stages:
        placeholders = dict(zip(stage.inputs, stage.module.graph.find_nodes(op="placeholder"), strict=False))
        outputs = dict(zip(stage.outputs, returned(stage.module), strict=False))
        buffers = {port: value for port, value in outputs.items() if port.kind is PortKind.BUFFER}
        settled = buffers_of_step(stage) if buffers else ()
        changing = {port: value for port, value in buffers.items() if port.name not in settled}
        for port, change in (changing | reached).items():
            read = closure([placeholders[port]], users) if port in placeholders else set[fx.Node]()
            edges = [each for each, value in outputs.items() if each.kind is not PortKind.BUFFER and value in read]
            reached |= {each: reached.get(each, change) for each in edges}
    return next((change for port, change in reached.items() if port in wanted), None)
