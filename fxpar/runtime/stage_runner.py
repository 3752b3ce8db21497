"""Run the graphs of one stage on the values of a step's state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from fxpar._torch.compiler import add_to_each
from fxpar.ir.stage import CompiledStage, Port, PortKind
from fxpar.model.loss_scale import LossScale
from fxpar.runtime.gradients import own_memory
from fxpar.runtime.step_state import StepState
from fxpar.schedule import Kind
from fxpar.transport.buffers import Piece


class StageRunner:
    """Everything about a stage that does not change between steps.

    Args:
        returned: the edges whose gradients the stage sends back; zeros for those that it computes none for.
        microbatches: how many a step has.
        loss_weight: the weight of one microbatch's loss in the loss of the step.
        loss_scale: the factor on it.
    """

    def __init__(
        self,
        stage: CompiledStage,
        returned: Collection[str],
        microbatches: int,
        loss_weight: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.stage, self._last = stage, microbatches - 1
        self._loss_weight, self._loss_scale = loss_weight, loss_scale
        self._leaving = [port.name for port in stage.outputs if port.kind is PortKind.EDGE]
        self._read = [port for port in stage.inputs if port.kind is PortKind.EDGE]
        self._returning = [port.name for port in self._read if port.name in returned]
        # The source waits for a gradient from every reader, even from one whose results do not depend on the value.
        self._zeros = {
            port.name: Piece.like(piece).empty().zero_()
            for port, piece in zip(stage.inputs, stage.input_pieces, strict=True)
            if port.name in self._returning and port not in stage.gradients
        }
        late = [port for port in stage.gradients if port.kind is not PortKind.EDGE]
        self.parameters = [port.name for port in late if port.kind is PortKind.PARAMETER]
        self._differentiated = {place: port.name for place, port in enumerate(late) if port.kind is PortKind.INPUT}
        self._edges = stage.returned_edges
        self._trains = bool(stage.gradients)
        self._runs: Mapping[Kind, Callable[[int, StepState], None]] = {
            "F": self._forward,
            "B": self._backward if self._trains else self._nothing_to_train,
            "I": self._input_gradients if self._trains else self._nothing_to_train,
            "W": self._weight_gradients if self._trains else self._nothing_to_train,
        }

    @property
    def edges_read(self) -> list[str]:
        """The edges that the forward has as inputs."""
        return [port.name for port in self._read]

    def gather(self, state: StepState) -> None:
        """Start the all-gathers of parameters that are gathered once per step; the graphs wait for them."""
        gathers = self.stage.gathers
        if gathers is not None:
            given = gathers.run(*(state.parameters[name] for name in gathers.names))
            state.gathered[self.stage.index] = dict(zip(gathers.names, given, strict=True))

    def run(self, kind: Kind, microbatch: int, state: StepState) -> None:
        """Run the graph for actions of `kind`."""
        self._runs[kind](microbatch, state)

    def free(self, kind: Kind, microbatch: int, state: StepState) -> None:
        """Drop the values that were sent (the message holds them), and what was saved for this action."""
        if kind == "F":
            for edge in self._leaving:
                del state.leaving[edge, microbatch]
        elif kind in ("B", "I"):
            for edge in self._leaving:
                state.gradients.pop((edge, microbatch), None)
            for edge in self._returning:
                del state.returning[edge, self.stage.index, microbatch]
            if self._trains:
                del state.saved[self.stage.index, microbatch]
        elif self._trains:
            del state.carried[self.stage.index, microbatch]

    def _forward(self, microbatch: int, state: StepState) -> None:
        stage = self.stage
        made = stage.forward(*[self._input(port, microbatch, state) for port in stage.inputs])
        for port, value in zip(stage.outputs, made, strict=False):
            if port.kind is PortKind.EDGE:
                state.leaving[port.name, microbatch] = value
            elif port.kind is PortKind.BUFFER:
                if microbatch == self._last or port.name not in stage.buffers_of_step:
                    state.buffers[port.name].copy_(value)
            else:
                state.results.setdefault(int(port.name), {})[microbatch] = value
        if stage.backward is not None or stage.split is not None:
            state.saved[stage.index, microbatch] = made[len(stage.outputs) :]

    def _input(self, port: Port, microbatch: int, state: StepState) -> Tensor:
        match port.kind:
            case PortKind.PARAMETER:
                gathered = state.gathered.get(self.stage.index, {})
                return gathered[port.name] if port.name in gathered else state.parameters[port.name]
            case PortKind.BUFFER:
                return state.buffers[port.name]
            case PortKind.INPUT:
                return state.inputs[port.name][microbatch]
        return state.values[port.name, microbatch]

    def _backward(self, microbatch: int, state: StepState) -> None:
        stage = self.stage
        assert stage.backward is not None, f"stage {stage.index} was compiled without a whole backward"
        tangents = self._tangents(microbatch, state)
        made = stage.backward(*state.saved[stage.index, microbatch], *tangents)
        gradients = dict(zip(stage.gradients, made, strict=True))
        returning = [gradients.pop(port) for port in stage.gradients if port.kind is PortKind.EDGE]
        self._return(returning, microbatch, state)
        # A gradient may be one of the tangents themselves, which another stage of this rank may still use.
        self._accumulate(list(gradients.values()), [*returning, *tangents], microbatch, state)

    def _input_gradients(self, microbatch: int, state: StepState) -> None:
        stage = self.stage
        assert stage.split is not None, f"stage {stage.index} was compiled without a split backward"
        saved = state.saved[stage.index, microbatch]
        made = stage.split.inputs(*stage.split.for_inputs(saved), *self._tangents(microbatch, state))
        self._return(made[: len(self._edges)], microbatch, state)
        state.carried[stage.index, microbatch] = [*stage.split.for_weights(saved), *made[len(self._edges) :]]

    def _weight_gradients(self, microbatch: int, state: StepState) -> None:
        stage = self.stage
        assert stage.split is not None, f"stage {stage.index} was compiled without a split backward"
        kept = state.carried[stage.index, microbatch]
        self._accumulate(stage.split.weights(*kept), kept, microbatch, state)

    def _nothing_to_train(self, microbatch: int, state: StepState) -> None:
        """The backward of a stage without gradients: stages that wait for the gradient of an edge get zeros."""
        self._return((), microbatch, state)
        self._accumulate((), (), microbatch, state)

    def _return(self, gradients: Sequence[Tensor], microbatch: int, state: StepState) -> None:
        for edge, gradient in (*zip(self._edges, gradients, strict=True), *self._zeros.items()):
            state.returning[edge, self.stage.index, microbatch] = gradient

    def _accumulate(
        self, gradients: Sequence[Tensor], others: Sequence[Tensor], microbatch: int, state: StepState
    ) -> None:
        """Add gradients of parameters to their sums, and keep those of inputs; `others` may share their memory."""
        terms = gradients
        if self._differentiated:
            terms = [gradient for place, gradient in enumerate(gradients) if place not in self._differentiated]
            of_inputs = own_memory([gradients[place] for place in self._differentiated], [*others, *terms])
            for name, gradient in zip(self._differentiated.values(), of_inputs, strict=True):
                state.of_inputs.setdefault((name, microbatch), []).append(gradient)
        sums = state.sums.get(self.stage.index)
        if sums is None:
            state.sums[self.stage.index] = own_memory(terms, others)
        elif sums:
            add_to_each(sums, terms)

    def _tangents(self, microbatch: int, state: StepState) -> list[Tensor]:
        return [self._tangent(port, microbatch, state) for port in self.stage.tangents]

    def _tangent(self, port: Port, microbatch: int, state: StepState) -> Tensor:
        """For the loss, its scaled weight in the mean; for an edge, the sum of its readers' gradients."""
        if port.kind is PortKind.RESULT:
            loss = state.results[int(port.name)][microbatch]
            weight = torch.full((), self._loss_weight, dtype=loss.dtype, device=loss.device)
            return weight if self._loss_scale is None else self._loss_scale.scaled(weight)
        total, *others = state.gradients[port.name, microbatch]
        for gradient in others:
            total = total + gradient
        return total
