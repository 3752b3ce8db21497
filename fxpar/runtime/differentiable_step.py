"""Steps of a forward that a script computes its loss of: its results, and then the gradients of that loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import NotTheLossError
from fxpar.ir.capture import Capture, example
from fxpar.ir.result_gradients import ResultGradient
from fxpar.ir.stage import Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.runtime.finished_gradients import check_first_derivative
from fxpar.runtime.results import reduce_over_shards
from fxpar.runtime.step import Step
from fxpar.world.mesh import num_batch_shards


class Forward(Protocol):
    """Computes the results of a forward for Dynamo's arguments, as plain tensors of a batch shard."""

    def __call__(self, *args: Tensor) -> Sequence[Any]: ...

    def changed_buffers(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Those among the arguments that it changes on this rank."""
        ...


class StepOfResults:
    """A step that is given the gradients of results; with a backward for its gradients, without one for the results.

    Args:
        capture: by `differentiate_results`.
    """

    def __init__(self, capture: Capture, distribution: Distribution, step: Step) -> None:
        self._step, self._mesh = step, distribution.mesh
        self._results = capture.result_gradients
        self._num_arguments = min(each.argument for each in self._results)
        microbatches, device = distribution.microbatches_of(capture), distribution.mesh.device_type
        # Made anew in each call, since they are as large as the results.
        self._zeros = {each: partial(_zeros, each, capture, microbatches, device) for each in self._results}
        self.positions = {each.position for each in self._results}

    def __call__(self, *args: Tensor) -> tuple[Any, ...]:
        """The results of the forward, in its order."""
        with torch.no_grad():
            return self._step(*args[: self._num_arguments], *(zeros() for zeros in self._zeros.values()))[:-1]

    def gradients(self, args: Sequence[Tensor], of_results: Sequence[Tensor | None]) -> dict[Port, Tensor]:
        """As of the step, for the gradients of all results, of which None is zero."""
        given = [
            zeros() if (gradient := of_results[each.position]) is None else self._of_all_shards(each, gradient)
            for each, zeros in self._zeros.items()
        ]
        return self._step.gradients(*args[: self._num_arguments], *given)

    def changed_buffers(self, args: Sequence[Tensor]) -> list[Tensor]:
        """As of the step."""
        return self._step.changed_buffers(args)

    def _of_all_shards(self, result: ResultGradient, gradient: Tensor) -> Tensor:
        """The gradient as it enters the step: without samples, the mean of those of the losses of all batch shards."""
        num_shards = num_batch_shards(self._mesh)
        if result.batch_dim is not None or num_shards == 1:
            return gradient.contiguous()
        name = f"the gradient of result {result.position}"
        return reduce_over_shards(gradient.clone(), dist.ReduceOp.SUM, name, self._mesh) / num_shards


def _zeros(result: ResultGradient, capture: Capture, microbatches: int, device: str) -> Tensor:
    like = example(capture.results[result.position])
    shape = list(like.shape)
    if result.batch_dim is not None:
        shape[result.batch_dim] *= microbatches
    return torch.zeros(shape, dtype=like.dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the results of a call depend on besides parameters.

    num_steps: decides its random numbers.
    buffers: those that it changes, each with its value before.
    """

    args: Sequence[Tensor]
    num_steps: int
    buffers: Sequence[tuple[Tensor, Tensor]]


class DifferentiableStep:
    """Runs the forward for its results; a backward from these runs a step that is given their gradients.

    So the forward runs twice, both times with the same random numbers and the same values of buffers.

    Args:
        capture: settled.
        training: returns the step of a backward.
    """

    def __init__(
        self, capture: Capture, distribution: Distribution, forward: Forward, training: Callable[[], StepOfResults]
    ) -> None:
        self._distribution, self._forward, self._training = distribution, forward, training
        self._names = [f"result {i} of the forward ({node.name})" for i, node in enumerate(capture.results)]
        self._differentiable = [i for i in capture.differentiable if i != capture.loss]
        self._inputs = {port: i for port, i in capture.arguments.items() if port.kind is PortKind.INPUT}
        self._changes_arguments = bool(capture.argument_changes)
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)  # see `Step`

    def __call__(self, *args: Tensor) -> tuple[Any, ...]:
        """The results of the forward, in its order."""
        call = self._begin(args)
        results = list(self._forward(*args))
        self._distribution.num_steps = call.num_steps + 1
        held = self._distribution.own_parameters()
        leaves: dict[Port, Tensor] = {Port(PortKind.PARAMETER, name): p for name, p in held.items() if p.requires_grad}
        leaves |= {port: call.args[position] for port, position in self._inputs.items()}
        values = _Values([results[position].detach() for position in self._differentiable])
        connected = _Connect.apply(  # type: ignore[no-untyped-call]
            self, call, values, list(leaves), self._anchor, *leaves.values()
        )
        for position, result in zip(self._differentiable, connected, strict=True):
            results[position] = result
        return tuple(results)

    def backward(self, call: _Call, gradients: Sequence[Tensor | None]) -> dict[Port, Tensor]:
        """As of `Step`, for the gradients of the results that can be differentiated.

        Raises:
            NotTheLossError: one is given of a result of which it is not known how samples make it up.
        """
        training = self._training()
        of_results: list[Tensor | None] = [None] * len(self._names)
        for position, gradient in zip(self._differentiable, gradients, strict=True):
            of_results[position] = gradient
            if gradient is not None and position not in training.positions:
                raise NotTheLossError(self._names[position])
        with self._as_in(call):
            return training.gradients(call.args, of_results)

    def _begin(self, args: Sequence[Tensor]) -> _Call:
        buffers = [(buffer, buffer.clone()) for buffer in self._forward.changed_buffers(args)]
        kept = [argument.clone() for argument in args] if self._changes_arguments else args
        return _Call(kept, self._distribution.num_steps, buffers)

    @contextmanager
    def _as_in(self, call: _Call) -> Iterator[None]:
        """Within, random numbers and buffers are those of the call; afterwards, they are as before."""
        now, num_steps = [buffer.clone() for buffer, _ in call.buffers], self._distribution.num_steps
        with torch.no_grad():
            try:
                self._distribution.num_steps = call.num_steps
                for buffer, value in call.buffers:
                    buffer.copy_(value)
                yield
            finally:
                self._distribution.num_steps = num_steps
                for (buffer, _), value in zip(call.buffers, now, strict=True):
                    buffer.copy_(value)


@dataclass(frozen=True, slots=True)
class _Values:
    """Hides tensors from autograd, which would take them for arguments of a function."""

    tensors: Sequence[Tensor]


class _Connect(torch.autograd.Function):
    """Connects results to the parameters in autograd, by a backward that computes the gradients of these.

    PyTorch notices if parameters or inputs were changed in place since.
    """

    @staticmethod
    def forward(
        ctx: Any,
        step: DifferentiableStep,
        call: _Call,
        values: _Values,
        ports: Sequence[Port],
        anchor: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.call, ctx.ports = step, call, ports
        ctx.save_for_backward(*leaves)
        ctx.set_materialize_grads(False)
        # What such a function returns may be changed in place only if it is no view.
        return tuple(value.clone() if value._is_view() else value for value in values.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        assert len(ctx.saved_tensors) == len(ctx.ports)  # to read them raises if they were changed
        found = ctx.step.backward(ctx.call, gradients)
        return (None,) * 5 + tuple(map(found.get, ctx.ports))
