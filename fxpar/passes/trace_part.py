"""Trace some operations of a captured forward by themselves, to find out what they do with their operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxpar.ir.stage import JointGraph, StageGraph
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.trace.segment import Segment
from fxpar.passes.trace.trace_whole import trace_whole


def trace_part(
    module: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> JointGraph:
    """The forward in ATen ops of the operations `nodes` of a torch-IR graph, as decomposed for sharding.

    Its ports are named by the positions among `inputs` and `outputs`.
    """
    segment = Segment(tuple(nodes), tuple(inputs), tuple(outputs), (), frozenset())
    joint = trace_whole(segment.graph(StageGraph(0, module, (), ())), with_backward=False)
    return replace(joint, module=decompose_for_sharding(joint.module))
