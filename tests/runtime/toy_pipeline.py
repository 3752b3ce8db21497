"""A small pipeline whose stages are plain functions: it has all that can cross a stage's border.

Every stage multiplies the activation by a weight, and adds a bias. The first one's activation also goes to every later
stage (a skip connection with several readers); the last one takes it twice, the second time through an edge of its own
that it has no gradient for. A mask of integers, an edge without any gradient, goes from the first to the last, as does
a tied parameter. The last stage counts in a buffer, and returns predictions besides the loss.

All operations but the loss are elementwise, so that the same functions run on whole tensors and on pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from fxpar.ir.layout import Layout, Partial, Shard
from fxpar.ir.plan import PlannedParameter
from fxpar.ir.stage import Port, PortKind

ROWS, WIDTH = 3, 6
"""Shape of one microbatch's activation; two ranks share the rows unevenly."""


Values: TypeAlias = dict[Port, Tensor]


X = Port(PortKind.INPUT, "0")
SCALE = Port(PortKind.INPUT, "1")
LOSS = Port(PortKind.RESULT, "0")
PREDICTION = Port(PortKind.RESULT, "1")
COUNT = Port(PortKind.BUFFER, "count")
TIED = Port(PortKind.PARAMETER, "tied")
MASK = Port(PortKind.EDGE, "mask")
CUT = Port(PortKind.EDGE, "cut")


def weight(stage: int) -> Port:
    return Port(PortKind.PARAMETER, f"{stage}.weight")


def bias(stage: int) -> Port:
    return Port(PortKind.PARAMETER, f"{stage}.bias")


def activation(stage: int) -> Port:
    return Port(PortKind.EDGE, f"activation{stage}")


@dataclass(frozen=True, slots=True)
class Toy:
    """A pipeline of as many stages as `layouts`; each computes in its layout. The last one's must be replicated."""

    layouts: Sequence[Layout]

    @property
    def last(self) -> int:
        return len(self.layouts) - 1

    def inputs(self, stage: int) -> list[Port]:
        ports = [weight(stage), bias(stage)]
        if stage in (0, self.last):
            ports.append(TIED)
        if stage == 0:
            ports.append(X)
        else:
            ports += sorted({activation(0), activation(stage - 1)}, key=str)
        if stage == self.last:
            ports += [SCALE, COUNT] if stage == 0 else [SCALE, COUNT, MASK, CUT]
        elif stage == 1:
            ports.append(CUT)  # so that somebody has a gradient for it
        return ports

    def outputs(self, stage: int) -> list[Port]:
        if stage == self.last:
            return [LOSS, PREDICTION, COUNT]
        return [activation(0), MASK, CUT] if stage == 0 else [activation(stage)]

    def tangents(self, stage: int) -> list[Port]:
        if stage == self.last:
            return [LOSS]
        return [port for port in self.outputs(stage) if port != MASK and (port != CUT or self.last > 1)]

    def gradients(self, stage: int) -> list[Port]:
        leaves = [port for port in self.inputs(stage) if port.kind in (PortKind.PARAMETER, PortKind.EDGE)]
        return [port for port in leaves if port != MASK and (port != CUT or stage < self.last)]

    def run(self, stage: int, values: Values) -> Values:
        """The stage's function, on whole tensors or pieces."""
        previous = values[X] if stage == 0 else values[activation(stage - 1)]
        out = torch.tanh(previous * values[weight(stage)]) + values[bias(stage)]
        if stage >= 1:
            out = out + 0.5 * values[activation(0)]
        if stage == 0:
            out = out + values[TIED]
        if stage == 1 and stage < self.last:
            out = out + values[CUT].sin()
        if stage == self.last:
            return self._end(stage, out, values)
        made = {activation(stage): out}
        return made | {MASK: (values[X] > 0).long(), CUT: out * 2} if stage == 0 else made

    def _end(self, stage: int, out: Tensor, values: Values) -> Values:
        mask = values[MASK] + values[CUT].detach().sign() if stage > 0 else 1.0
        out = out * mask * values[TIED]
        count = 0.5 * values[COUNT] + out.detach().mean()
        return {LOSS: (out * values[SCALE]).square().mean(), PREDICTION: out, COUNT: count}

    def layout(self, port: Port, stage: int) -> Layout:
        """How a port lies on the stage's ranks; inputs come whole."""
        if port.kind is PortKind.INPUT:
            return Layout((ROWS, WIDTH))
        if port in (LOSS, COUNT) or port.name.endswith("bias"):
            return Layout(())
        return self.layouts[stage]

    def gradient_layout(self, port: Port, stage: int) -> Layout:
        """As the value; but a rank's piece of an activation returns only a part of the bias's gradient."""
        if not port.name.endswith("bias"):
            return self.layout(port, stage)
        sharded = [axis for axis, placement in self.layouts[stage].axes if isinstance(placement, Shard)]
        return Layout((), tuple((axis, Partial()) for axis in sharded))


def owners(toy: Toy) -> dict[str, PlannedParameter]:
    """The first stage that uses each parameter, and how it lies there."""
    planned: dict[str, PlannedParameter] = {}
    for stage in range(len(toy.layouts)):
        for port in toy.inputs(stage):
            if port.kind is PortKind.PARAMETER:
                planned.setdefault(port.name, PlannedParameter(stage, toy.layout(port, stage)))
    return planned


def whole_values(toy: Toy, batch: int) -> dict[str, Tensor]:
    """Random logical parameters, the buffer, and the two inputs of a global batch, by name."""
    generator = torch.Generator().manual_seed(7)
    random = partial(torch.randn, generator=generator, dtype=torch.double)
    values = {name: random(planned.layout.shape) for name, planned in owners(toy).items()}
    return values | {"count": random(()), "0": random(batch, WIDTH), "1": random(ROWS, WIDTH)}


@dataclass(frozen=True, slots=True)
class Expected:
    """What one process computes: predictions and buffers by batch shard."""

    loss: Tensor
    gradients: dict[str, Tensor]
    predictions: list[list[Tensor]]
    counts: list[Tensor]


def run_alone(toy: Toy, values: Mapping[str, Tensor], data: int, microbatches: int) -> Expected:
    """The same step on whole tensors, microbatch after microbatch."""
    parameters = {name: values[name].clone().requires_grad_() for name in owners(toy)}
    losses, predictions, counts = [], [], []
    for shard in values["0"].chunk(data):
        count, found = values["count"], []
        for microbatch in shard.chunk(microbatches):
            known = {Port(PortKind.PARAMETER, name): p for name, p in parameters.items()}
            known |= {X: microbatch, SCALE: values["1"], COUNT: count}
            for stage in range(len(toy.layouts)):
                known |= toy.run(stage, known)
            losses.append(known[LOSS])
            found.append(known[PREDICTION].detach())
            count = known[COUNT].detach()
        predictions.append(found)
        counts.append(count)
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return Expected(loss.detach(), dict(zip(parameters, gradients, strict=True)), predictions, counts)
