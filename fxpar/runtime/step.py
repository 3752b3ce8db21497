"""The callable that the backend returns to `torch.compile`: one whole step of a distributed model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar._torch.distributed import piece_of
from fxpar.costs.model_arithmetic import Arithmetic
from fxpar.ir.capture import Capture
from fxpar.ir.dtensor import from_locals
from fxpar.ir.random import RANDOM_STATE, random_state
from fxpar.ir.stage import Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.runtime.batch_totals import StepTotals
from fxpar.runtime.changes import ArgumentChanges, ParameterChanges
from fxpar.runtime.executor import Executor, StepResult
from fxpar.runtime.finished_gradients import FinishedGradients, connect
from fxpar.runtime.gathered_step import gather_step
from fxpar.runtime.loss import Loss
from fxpar.runtime.microbatches import Microbatches
from fxpar.runtime.not_the_loss import refuse_backward
from fxpar.runtime.recorder import Recorder
from fxpar.runtime.report_writer import ReportWriter
from fxpar.runtime.results import ResultSpec, gather_result
from fxpar.runtime.step_stats import Recorded, is_recording, remember_recorded
from fxpar.world.mesh import batch_rank


class Step:
    """Runs the schedule, and returns results and loss as the model's forward would.

    Args:
        gather: joins the microbatches of a result; it takes the arguments of `gather_result`.
    """

    def __init__(
        self,
        capture: Capture,
        loss: Loss | None,
        distribution: Distribution,
        executor: Executor,
        results: Sequence[ResultSpec],
        call: str,
        timeline: Path | None = None,
        *,
        with_backward: bool,
        gather: Callable[..., Tensor] = gather_result,
        check_inputs: Callable[[Mapping[str, Tensor]], None] | None = None,
        totals: StepTotals | None = None,
        arithmetic: Arithmetic,
        report: ReportWriter | None = None,
    ) -> None:
        self._distribution = distribution
        self._microbatches = distribution.microbatches_of(capture)
        self._executor = executor
        self._results = results
        self._call = call
        self._timeline = timeline
        self._loss = None if loss is None else loss.position
        # The forward may return its loss at several places.
        self._is_loss = [loss is not None and node is capture.results[loss.position] for node in capture.results]
        self._gather = gather
        self._check_inputs = check_inputs
        self._totals = totals
        self._parameter_changes = ParameterChanges(capture.parameter_changes, distribution.mesh.coordinate)
        self._arithmetic = arithmetic
        self._batch_dims = {port.name: dim for port, dim in capture.batch_dims.items()}
        self._argument_changes = ArgumentChanges(
            capture.argument_changes, Microbatches(self._microbatches, self._batch_dims)
        )
        self._report = report
        self._with_backward = with_backward
        self._inputs = {p.name: i for p, i in capture.arguments.items() if p.kind is PortKind.INPUT}
        self._differentiated = capture.differentiated
        self._buffers = {p.name: i for p, i in capture.arguments.items() if p.kind is PortKind.BUFFER}
        self._wrap: dict[str, Callable[[Tensor], DTensor]] = {}
        # Stays a leaf of the loss on a rank that holds no parameter, where nothing else would require grad.
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)

    def __call__(self, *args: Tensor) -> tuple[Tensor | None, ...]:
        """Run a step on Dynamo's arguments; returns the results of the forward, in its order."""
        with self._distribution.calls.running(self._call):
            held, inputs = self._distribution.own_parameters(), self._inputs_among(args)
            self._parameter_changes.make(held)
            done = self._run(held, inputs, self._buffers_among(args))
            self._argument_changes.make(inputs)
            loss = done.loss
            if self._with_backward:
                gradients = self._gradients(held, done)
                leaves = [*(held[name] for name in gradients.names), *(inputs[name] for name in self._differentiated)]
                assert loss is not None, "a step with a backward has a loss"
                loss = connect(loss, gradients, self._anchor, leaves)
            return tuple(
                loss if is_loss else self._result(position, done.results.get(position))
                for position, is_loss in enumerate(self._is_loss)
            )

    def gradients(self, *args: Tensor) -> dict[Port, Tensor]:
        """Run a step whose forward has run before; returns the gradients of own parameters and inputs.

        What the forward does to parameters and arguments is done.
        """
        with self._distribution.calls.running(self._call):
            held = self._distribution.own_parameters()
            gradients = self._gradients(held, self._run(held, self._inputs_among(args), self._buffers_among(args)))
            ports = [Port(PortKind.PARAMETER, name) for name in gradients.names]
            ports += [Port(PortKind.INPUT, name) for name in self._differentiated]
            return dict(zip(ports, gradients.take(), strict=True))

    def changed_buffers(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Those among Dynamo's arguments that a step changes on this rank."""
        buffers = self._buffers_among(args)
        return [buffers[name] for name in self._executor.changed_buffers]

    def _inputs_among(self, args: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: args[position] for name, position in self._inputs.items()}

    def _buffers_among(self, args: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: args[position] for name, position in self._buffers.items()}

    def _run(
        self, held: Mapping[str, DTensor], inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> StepResult:
        parameters = {name: self._in_compute_dtype(name, piece_of(parameter)) for name, parameter in held.items()}
        if self._check_inputs is not None:
            self._check_inputs(inputs)
        given = {**inputs, RANDOM_STATE.name: self._draw()}
        with torch.no_grad():
            if self._totals is not None:
                given |= self._totals(given, buffers)
            self._executor.rehearse(parameters, buffers, given)
            if self._timeline is not None or is_recording(self._distribution):
                return self._record((parameters, buffers, given))
            return self._executor.run(parameters, buffers, given)

    def _gradients(self, held: Mapping[str, DTensor], done: StepResult) -> FinishedGradients:
        if (scale := self._distribution.loss_scale) is not None:
            scale.unscale([*done.gradients.values(), *done.of_inputs.values()])
        trained = {name: local for name, local in done.gradients.items() if held[name].requires_grad}
        return FinishedGradients(trained, self._as_gradient, list(done.of_inputs.values()))

    def _in_compute_dtype(self, name: str, held: Tensor) -> Tensor:
        return held.detach().to(self._distribution.parameters[name].compute_dtype)

    def _as_gradient(self, name: str, local: Tensor) -> DTensor:
        """The gradient of a parameter from this rank's piece of it."""
        if name not in self._wrap:
            planned, parameter = self._distribution.final_plan.parameters[name], self._distribution.parameters[name]
            self._wrap[name] = from_locals(planned.layout, self._distribution.mesh.stage_mesh, parameter.dtype)
        return self._wrap[name](local.to(self._distribution.parameters[name].dtype))

    def _record(self, arguments: tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]]) -> StepResult:
        """Run the step, keep its record, and write its timeline if that is asked for: a collective of all ranks."""
        mesh = self._distribution.mesh
        recorder = Recorder(mesh.coordinate["pipe"], mesh.device_type)
        with recorder.recording():
            done = self._executor.run(*arguments, recorder.observe)
        samples, tokens = _batch_size(arguments[-1], self._batch_dims)
        remember_recorded(self._distribution, Recorded(recorder, self._arithmetic, samples, tokens))
        if self._timeline is not None:
            self._write_timelines(recorder, self._timeline)
        return done

    def _write_timelines(self, recorder: Recorder, directory: Path) -> None:
        """Write the timelines of all ranks, on rank 0, and the report that shows them, if it is time."""
        mesh = self._distribution.mesh
        step = gather_step(recorder, mesh)
        if mesh.rank == 0:
            timelines = step.save(directory, mesh.pipe)
            if self._report is not None:
                self._report.after_step(timelines)

    def _draw(self) -> Tensor:
        """The random state of this step; it advances with every training step."""
        distribution = self._distribution
        mesh, microbatches = distribution.mesh, self._microbatches
        first = batch_rank(mesh) * microbatches
        state = random_state(distribution.seed, distribution.num_steps, first, microbatches, mesh.device_type)
        distribution.num_steps += self._with_backward
        return state

    def _result(self, position: int, pieces: Sequence[Tensor] | None) -> Tensor:
        """A result other than the loss; it cannot be differentiated."""
        spec, held_by = self._results[position], self._distribution.placement[-1]
        with torch.no_grad():
            result = self._gather(pieces, spec, self._distribution.mesh, self._microbatches, held_by)
        if not (self._with_backward and spec.requires_grad):
            return result
        assert self._loss is not None, "a step with a backward has a loss"
        return refuse_backward(result, spec.name, self._results[self._loss].name)


def _batch_size(inputs: Mapping[str, Tensor], batch_dims: Mapping[str, int]) -> tuple[int, int]:
    """How many samples one batch shard has, and how many tokens: integers with another dim beside that of the batch."""
    split = [(value, batch_dims[name]) for name, value in inputs.items() if name in batch_dims]
    samples = next((value.shape[dim] for value, dim in split), 0)
    integers = (torch.int64, torch.int32)
    return samples, next((value.numel() for value, _ in split if value.dtype in integers and value.dim() > 1), 0)
