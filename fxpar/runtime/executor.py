"""Run a rank's program for one step: computes, receives and sends, and the gradients that come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpar._torch import add_to_each
from fxpar.mesh import Mesh
from fxpar.runtime.buffers import Piece
from fxpar.runtime.gradients import own_memory, reduce_over_batch, reduce_partial
from fxpar.runtime.loss import Loss, LossMean, begin_mean, loss_weight
from fxpar.runtime.stage_way import StageWay
from fxpar.runtime.wiring import Connections
from fxpar.schedule import Action, Compute, Free, Instruction, PostReceive, Program, Send, Transfer, Wait
from fxpar.stage import CompiledStage, Port, PortKind


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss, all results by position and microbatch, and the local gradients of this stage's parameters."""

    loss: Tensor | None
    results: Mapping[int, Sequence[Tensor]]
    gradients: dict[str, Tensor]


@dataclass(slots=True)
class _State:
    """All that is alive during one step; `arguments` are the forward's, with gaps for what differs by microbatch.

    What crosses the stage's border goes by edge and microbatch. An edge that is read here has one value in `arrived`
    and a gradient in `sent`; one that is made here has a gradient of each reader in `arrived` and its value in `sent`.
    """

    arguments: list[Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Mapping[str, Sequence[Tensor]]
    posted: dict[Transfer, Any] = field(default_factory=dict)
    arrived: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    leaving: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    returning: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    saved: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    results: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    sent: dict[tuple[str, int], Any] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)


class Executor:
    """Interprets a program; everything that does not change between steps is bound when it is made.

    Args:
        program: this rank's instructions.
        stage: the compiled stage that they run.
        connections: what this rank exchanges with other stages.
        microbatches: how many of them a step has.
        batch_dims: the dim along which each input is split into microbatches; inputs not named are shared.
        loss: the loss, if there is one.
    """

    def __init__(
        self,
        mesh: Mesh,
        program: Program,
        stage: CompiledStage,
        connections: Connections,
        microbatches: int,
        batch_dims: Mapping[str, int],
        loss: Loss | None,
    ) -> None:
        self._mesh = mesh
        self._stage = stage
        self._traffic = connections.traffic
        self._lending = connections.lending
        self._microbatches = microbatches
        self._batch_dims = batch_dims
        self._loss = loss
        self._loss_weight = loss_weight(mesh, microbatches)
        self._gap = torch.empty(0)
        self._moving = [
            (position, port)
            for position, port in enumerate(stage.inputs)
            if port.kind in (PortKind.INPUT, PortKind.EDGE)
        ]
        self._parameters = [port.name for port in stage.gradients if port.kind is PortKind.PARAMETER]
        waited = [i.transfer for i in program.instructions if isinstance(i, Wait)]
        self._read = {transfer.edge for transfer in waited if not transfer.is_backward}
        self._differentiated = {transfer.edge for transfer in waited if transfer.is_backward}
        self._leaving = [port for port in stage.outputs if port.kind is PortKind.EDGE]
        returned = {i.transfer.edge for i in program.instructions if isinstance(i, Send) and i.transfer.is_backward}
        self._returning = [port for port in stage.inputs if port.kind is PortKind.EDGE and port.name in returned]
        # The source waits for a gradient from every reader, also from one whose results do not depend on the value.
        self._zeros = {
            port.name: Piece.like(piece).empty().zero_()
            for port, piece in zip(stage.inputs, stage.input_pieces, strict=True)
            if port in self._returning and port not in stage.gradients
        }
        self._code = [self._bind(instruction) for instruction in program.instructions]
        self._state = _State([], {}, {})

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> StepResult:
        """Run one step on this rank's pieces; `inputs` are this batch shard's, whole.

        Raises:
            PeerLostError: another rank died.
        """
        try:
            borrowed = self._lending.exchange(parameters)
            held = {PortKind.PARAMETER: {**parameters, **borrowed}, PortKind.BUFFER: buffers}
            arguments = [held[port.kind][port.name] if port.kind in held else self._gap for port in self._stage.inputs]
            self._state = _State(arguments, buffers, self._split(inputs))
            for instruction in self._code:
                instruction()
            return self._finish()
        finally:
            self._state = _State([], {}, {})  # also of a step that failed, nothing is kept

    def _finish(self) -> StepResult:
        """What the step gives, once all that this rank sends or passes on has left."""
        state, self._state = self._state, _State([], {}, {})
        results = {position: [value for _, value in sorted(by.items())] for position, by in state.results.items()}
        loss = self._begin_loss(results)
        gradients = self._finish_gradients(state.gradients)
        for (edge, _), shipment in state.sent.items():
            self._traffic[edge, self._stage.index].complete(shipment)
        for way in self._traffic.values():
            way.finish()
        self._lending.finish()
        return StepResult(None if loss is None else loss.value(), results, gradients)

    def _split(self, inputs: Mapping[str, Tensor]) -> dict[str, Sequence[Tensor]]:
        split: dict[str, Sequence[Tensor]] = {}
        for name, value in inputs.items():
            if name in self._batch_dims:
                chunks = value.chunk(self._microbatches, self._batch_dims[name])
                split[name] = [chunk.contiguous() for chunk in chunks]
            else:
                split[name] = [value.contiguous()] * self._microbatches
        return split

    def _bind(self, instruction: Instruction) -> Callable[[], Any]:
        match instruction:
            case PostReceive(transfer):
                return partial(self._post, transfer, self._traffic[transfer.edge, transfer.source])
            case Wait(transfer):
                return partial(self._wait, transfer, self._traffic[transfer.edge, transfer.source])
            case Send(transfer):
                return partial(self._send, transfer, self._traffic[transfer.edge, transfer.source])
            case Compute(Action(kind="F", microbatch=microbatch)):
                return partial(self._forward, microbatch)
            case Compute(Action(kind="B", microbatch=microbatch)):
                return partial(self._backward, microbatch)
            case Free(action):
                return partial(self._free, action)
        raise AssertionError(f"no way to run {instruction}")

    def _post(self, transfer: Transfer, way: StageWay) -> None:
        self._state.posted[transfer] = way.post_receive(transfer.microbatch)

    def _wait(self, transfer: Transfer, way: StageWay) -> None:
        piece = way.wait(self._state.posted.pop(transfer))
        self._state.arrived.setdefault((transfer.edge, transfer.microbatch), []).append(piece)

    def _send(self, transfer: Transfer, way: StageWay) -> None:
        made = self._state.returning if transfer.is_backward else self._state.leaving
        sent = transfer.edge, transfer.microbatch
        self._state.sent[sent] = way.send(made[sent], transfer.microbatch)

    def _forward(self, microbatch: int) -> None:
        state, stage = self._state, self._stage
        arguments = state.arguments.copy()
        for position, port in self._moving:
            arguments[position] = self._moved(port, microbatch)
        made = stage.forward(*arguments)
        for port, value in zip(stage.outputs, made, strict=False):
            if port.kind is PortKind.EDGE:
                state.leaving[port.name, microbatch] = value
            elif port.kind is PortKind.BUFFER:
                state.buffers[port.name].copy_(value)
            else:
                state.results.setdefault(int(port.name), {})[microbatch] = value
        state.saved[microbatch] = made[len(stage.outputs) :]

    def _moved(self, port: Port, microbatch: int) -> Tensor:
        """A value that differs by microbatch."""
        if port.kind is PortKind.INPUT:
            return self._state.inputs[port.name][microbatch]
        (value,) = self._state.arrived[port.name, microbatch]
        return value

    def _backward(self, microbatch: int) -> None:
        state, stage = self._state, self._stage
        assert stage.backward is not None, f"stage {stage.index} was compiled without a backward"
        tangents = [self._tangent(port, microbatch) for port in stage.tangents]
        made = stage.backward(*state.saved.pop(microbatch), *tangents)
        terms, returning = [], []
        for port, gradient in zip(stage.gradients, made, strict=True):
            if port.kind is PortKind.EDGE:
                state.returning[port.name, microbatch] = gradient
                returning.append(gradient)
            else:
                terms.append(gradient)
        for name, zeros in self._zeros.items():
            state.returning[name, microbatch] = zeros
        if state.gradients:
            add_to_each(state.gradients, terms)
        else:
            state.gradients = own_memory(terms, returning)

    def _tangent(self, port: Port, microbatch: int) -> Tensor:
        """Of the loss, its weight in the mean; of an edge, the sum of what every stage that uses it sends back."""
        state = self._state
        if port.kind is PortKind.RESULT:
            loss = state.results[int(port.name)][microbatch]
            return torch.full((), self._loss_weight, dtype=loss.dtype, device=loss.device)
        total, *others = state.arrived[port.name, microbatch]
        for gradient in others:
            total = total + gradient
        return total

    def _free(self, action: Action) -> None:
        """Forget what `action` received and made; saved values were taken out when the backward ran.

        Who sends a gradient back has received the value. Once every reader has, what the forward sent to them is
        complete, and need not be kept until the end of the step.
        """
        state, microbatch = self._state, action.microbatch
        if action.kind == "F":
            for edge in self._read:
                del state.arrived[edge, microbatch]
            for port in self._leaving:
                del state.leaving[port.name, microbatch]
            return
        for edge in self._differentiated:
            del state.arrived[edge, microbatch]
            self._traffic[edge, self._stage.index].complete(state.sent.pop((edge, microbatch)))
        for port in self._returning:
            del state.returning[port.name, microbatch]

    def _finish_gradients(self, sums: Sequence[Tensor]) -> dict[str, Tensor]:
        """Reduce what is partial, give back what was borrowed, then reduce over the batch shards."""
        gradients = dict(zip(self._parameters, sums, strict=True)) if sums else {}
        layouts = {port.name: layout for port, layout in self._stage.border.gradients.items()}
        reduce_partial(gradients, layouts, self._mesh)
        self._lending.settle(gradients)
        reduce_over_batch(gradients, self._mesh)
        return gradients

    def _begin_loss(self, results: Mapping[int, Sequence[Tensor]]) -> LossMean | None:
        if self._loss is None:
            return None
        return begin_mean(results.get(self._loss.position, ()), self._loss, self._mesh, self._microbatches)
