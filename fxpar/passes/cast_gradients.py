"""Convert gradients of parameters to the dtype in which they are summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fxpar.graph.extract import returned
from fxpar.graph.graph_writer import WriterInPlace
from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import JointGraph, PortKind
from fxpar.progress.phases import as_phase


@as_phase
def cast_gradients(joint: JointGraph, dtypes: Mapping[str, torch.dtype]) -> None:
    """Let the gradient of each parameter leave `joint` in its dtype in `dtypes`, by parameter.

    Before: `dw = aten.mm(t, x)` in bf16, returned
    After:  `_to_copy = aten._to_copy(dw, dtype=torch.float32)`, returned
    """
    graph = joint.module.graph
    output = graph.output_node()
    values = returned(joint.module)
    num_outputs = len(joint.outputs)
    leaving: list[fx.Node] = []
    for port, gradient in zip(joint.gradients, values[num_outputs:], strict=True):
        if port.kind is PortKind.PARAMETER and tensor(gradient).dtype != dtypes[port.name]:
            with graph.inserting_before(output):
                write = WriterInPlace(graph, gradient).call
                gradient = write(torch.ops.aten._to_copy.default, gradient, dtype=dtypes[port.name])
        leaving.append(gradient)
    output.args = ((*values[:num_outputs], *leaving),)
    joint.module.recompile()
