"""Stages that run in one process on logical values, in place of the calls in the graph of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.ir.strides import strided_like

State: TypeAlias = dict[Port, Tensor]
"""Some tensors of a stage, by port."""


class LogicalForward(nn.Module):
    """`forward(state, *apart)` returns the outputs, then new buffers if there are any, then what the backward needs.

    For the backward it keeps its inputs: both run the joint graph whole, as a reference may.

    Args:
        apart: the inputs that come one by one; `state` has all others.
    """

    def __init__(self, joint: JointGraph, apart: Sequence[Port]) -> None:
        super().__init__()
        self._joint, self._apart = joint, tuple(apart)

    def forward(self, state: State, *apart: Tensor) -> tuple[Tensor | State | Sequence[Tensor], ...]:
        """Run the stage's forward."""
        values = {**state, **dict(zip(self._apart, apart, strict=True))}
        inputs = [values[port] for port in self._joint.inputs]
        placeholders = self._joint.module.graph.find_nodes(op="placeholder")
        unknown = [tensor(node) for node in placeholders[len(inputs) :]]
        tangents = [
            strided_like(torch.zeros(like.shape, dtype=like.dtype, device=like.device), like) for like in unknown
        ]
        made = dict(zip(self._joint.outputs, self._joint.module(*inputs, *tangents), strict=False))
        buffers = {port: made.pop(port) for port in self._joint.outputs if port.kind is PortKind.BUFFER}
        return (*made.values(), *([buffers] if buffers else []), inputs)


class LogicalBackward(nn.Module):
    """`forward(kept, *tangents)` returns the gradients of the ports `apart` one by one, then those of all others."""

    def __init__(self, joint: JointGraph, apart: Sequence[Port]) -> None:
        super().__init__()
        self._joint, self._apart = joint, tuple(apart)

    def forward(self, kept: Sequence[Tensor], *tangents: Tensor) -> tuple[Tensor | State, ...]:
        """Run the stage's backward."""
        expected = self._joint.module.graph.find_nodes(op="placeholder")[len(kept) :]
        given = [strided_like(tangent, tensor(node)) for tangent, node in zip(tangents, expected, strict=True)]
        made = self._joint.module(*kept, *given)[len(self._joint.outputs) :]
        gradients = dict(zip(self._joint.gradients, made, strict=True))
        return (*(gradients.pop(port) for port in self._apart), gradients)
