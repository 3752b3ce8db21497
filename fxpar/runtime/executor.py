"""Run a rank's program for one step: compute, receive, send, and reduce the gradients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from fxpar.ir.stage import CompiledStage, PortKind
from fxpar.lowering.observed_collectives import WAIT_FOR, observed
from fxpar.model.loss_scale import LossScale
from fxpar.runtime.broken_world import breaking_its_world
from fxpar.runtime.buffer_broadcast import BufferBroadcast
from fxpar.runtime.edge_transport import EdgeTransport
from fxpar.runtime.gradients import AxisReductions, sums_over_batch
from fxpar.runtime.input_gradients import InputGradients
from fxpar.runtime.loss import Loss, LossMean, begin_mean, loss_weight
from fxpar.runtime.microbatches import Microbatches
from fxpar.runtime.profiler_ranges import Observe, profiler_ranges
from fxpar.runtime.stage_reduction import ReductionPlan, StageReduction
from fxpar.runtime.stage_runner import StageRunner
from fxpar.runtime.step_state import StepState
from fxpar.runtime.wiring import Connections
from fxpar.schedule import (
    Action,
    Complete,
    Compute,
    Free,
    Instruction,
    PostReceive,
    Program,
    Reduce,
    Send,
    Transfer,
    Wait,
    rehearsal,
)
from fxpar.transport.local_transport import LocalTransport
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import Mesh

_Code: TypeAlias = Sequence[tuple[Instruction, Callable[[], Any]]]
"""Instructions, with what runs them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss, all results by position and microbatch, and gradients by name.

    gradients: the local ones of this rank's parameters.
    of_inputs: by `InputGradients`.
    """

    loss: Tensor | None
    results: Mapping[int, Sequence[Tensor]]
    gradients: dict[str, Tensor]
    of_inputs: dict[str, Tensor]


class Executor:
    """Interprets a program; everything that does not change between steps is bound in the constructor.

    Args:
        program: this rank's instructions.
        stages: the compiled stages that they run.
        connections: this rank's transports to and from others.
        microbatches: how many a step has.
        batch_dims: the dim along which each input is split into microbatches; inputs not named are shared.
        loss: the loss, if there is one.
        loss_scale: the factor on it; the gradients are those of the scaled loss.
        differentiated: the names of the inputs whose gradients are wanted.

    Attributes:
        changed_buffers: the names of those that the stages of this rank change.
    """

    def __init__(
        self,
        mesh: Mesh,
        program: Program,
        stages: Sequence[CompiledStage],
        connections: Connections,
        microbatches: int,
        batch_dims: Mapping[str, int],
        loss: Loss | None,
        loss_scale: LossScale | None = None,
        differentiated: Sequence[str] = (),
    ) -> None:
        self._mesh = mesh
        self._traffic = connections.traffic
        self._tied = connections.tied
        self._microbatches = microbatches
        self._split = Microbatches(microbatches, batch_dims)
        self._of_inputs = InputGradients(differentiated, self._split, mesh)
        self._loss = loss
        returned: defaultdict[int, set[str]] = defaultdict(set)
        for instruction in program.instructions:
            if isinstance(instruction, Send) and instruction.transfer.is_backward:
                returned[instruction.transfer.source].add(instruction.transfer.edge)
        weight = loss_weight(mesh, microbatches)
        self._runners = {
            stage.index: StageRunner(stage, returned[stage.index], microbatches, weight, loss_scale) for stage in stages
        }
        self._num_readers = Counter(edge for runner in self._runners.values() for edge in runner.edges_read)
        uses = Counter(name for runner in self._runners.values() for name in runner.parameters)
        shared = {name for name, count in uses.items() if count > 1} | self._tied.names
        self._plans = {stage.index: ReductionPlan.of(stage, shared, mesh) for stage in stages}
        own = {each.name: each for plan in self._plans.values() for each in plan.shared}
        self._shared_sums = sums_over_batch(self._tied.settled(own, mesh), mesh)
        outputs = [port for stage in sorted(stages, key=lambda stage: stage.index) for port in stage.outputs]
        self.changed_buffers = [port.name for port in outputs if port.kind is PortKind.BUFFER]
        self._code = self._bound(program)
        # Elsewhere, what a rank has posted keeps nothing from being launched.
        self._rehearsal = self._bound(rehearsal(program)) if mesh.moves_in_groups and mesh.pipe > 1 else []
        self._clear()

    @property
    def gradient_sums(self) -> dict[str, list[str]]:
        """Descriptions of the sums over axes of the mesh, in order, by a name that is the same on all ranks of a group.

        Ranks compare these before the first step.
        """
        of_axes: defaultdict[str, list[str]] = defaultdict(list)
        planned = [(f"stage {stage}", sums) for stage, plan in self._plans.items() for sums in plan.all_sums]
        planned += [("parameters of several stages", sums) for sums in self._shared_sums]
        for whose, sums in planned:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self._mesh.group(sums.axis))))
            of_axes[f"gradients of {whose} over {sums.axis}, ranks {ranks}"] += sums.describe()
        return dict(of_axes)

    def rehearse(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> None:
        """Before the first step, run its `rehearsal` on the arguments of `run`, where that is needed; changes nothing.

        Raises:
            PeerLostError, BrokenWorldError: as in `run`.
        """
        code, self._rehearsal = self._rehearsal, []
        if code:
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            self._run(code, parameters, copies, inputs)

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        observe: Observe | None = None,
    ) -> StepResult:
        """Run one step on this rank's pieces; `inputs` are those of this batch shard, not yet split.

        Raises:
            PeerLostError: another rank died.
            BrokenWorldError: an earlier step of several ranks failed on this one.
        """
        return self._run(self._code, parameters, buffers, inputs, observe)

    def _run(
        self,
        code: _Code,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        observe: Observe | None = None,
    ) -> StepResult:
        whole_or_none = breaking_its_world() if self._mesh.num_ranks > 1 else nullcontext()
        try:
            lost = naming_lost_peers("the parameters, gradients or loss of a step")
            with whole_or_none, lost, profiler_ranges(observe) as run_observed:
                held = {**parameters, **self._tied.exchange(parameters)}
                self._state = StepState(
                    held, buffers, {name: self._split.pieces(name, value) for name, value in inputs.items()}
                )
                for runner in self._runners.values():
                    runner.gather(self._state)
                for instruction, run in code:
                    if run_observed is None:
                        run()
                    else:
                        run_observed(instruction, self._state, run)
                return self._finish()
        finally:
            self._clear()  # after a failed step, too

    def _clear(self) -> None:
        self._state = StepState({}, {}, {})
        self._unread: dict[tuple[str, int], int] = {}
        self._reductions: list[StageReduction] = []
        for transport in self._traffic.values():
            transport.forget()

    def _finish(self) -> StepResult:
        """The results of the step, after everything that this rank sends or forwards has been sent."""
        state = self._state
        results = {position: [value for _, value in sorted(by.items())] for position, by in state.results.items()}
        loss = self._begin_loss(results)
        buffers = BufferBroadcast([state.buffers[name] for name in self.changed_buffers], self._mesh)
        gradients = self._finish_gradients()
        buffers.finish()
        of_inputs = self._of_inputs.join(state.of_inputs, state.inputs)
        # A rank joins the all-reduce of the loss after it has received everything. Where receives are not answered, the
        # loss therefore tells that what this rank sent has arrived.
        mean = None if loss is None else observed(f"{WAIT_FOR}all_reduce of the loss", loss.value)
        for transfer, shipment in state.sent.items():
            self._transport(transfer).complete(shipment)
        for transport in self._traffic.values():
            transport.finish()
        self._tied.finish()
        return StepResult(mean, results, gradients, of_inputs)

    def _bound(self, program: Program) -> _Code:
        return [(instruction, self._bind(instruction)) for instruction in program.instructions]

    def _bind(self, instruction: Instruction) -> Callable[[], Any]:
        match instruction:
            case PostReceive(transfer):
                return partial(self._post, transfer, self._transport(transfer))
            case Wait(transfer):
                return partial(self._wait, transfer, self._transport(transfer))
            case Send(transfer):
                return partial(self._send, transfer, self._transport(transfer))
            case Complete(transfer):
                return partial(self._complete, transfer, self._transport(transfer))
            case Compute(action):
                return partial(self._compute, action, self._runners[action.stage])
            case Free(action):
                return partial(self._free, action, self._runners[action.stage])
            case Reduce(stage):
                return partial(self._reduce, self._runners[stage])

    def _transport(self, transfer: Transfer) -> EdgeTransport | LocalTransport:
        return self._traffic[transfer.edge, transfer.source, transfer.targets]

    def _post(self, transfer: Transfer, transport: EdgeTransport | LocalTransport) -> None:
        self._state.posted[transfer] = transport.post_receive(transfer.microbatch)

    def _wait(self, transfer: Transfer, transport: EdgeTransport | LocalTransport) -> None:
        piece = transport.wait(self._state.posted.pop(transfer))
        key = transfer.edge, transfer.microbatch
        if transfer.is_backward:
            self._state.gradients.setdefault(key, []).append(piece)
        else:
            self._state.values[key] = piece
            self._unread[key] = self._num_readers[transfer.edge]

    def _send(self, transfer: Transfer, transport: EdgeTransport | LocalTransport) -> None:
        state, edge, microbatch = self._state, transfer.edge, transfer.microbatch
        if transfer.is_backward:
            piece = state.returning[edge, transfer.source, microbatch]
        else:
            piece = state.leaving[edge, microbatch]
        state.sent[transfer] = transport.send(piece, microbatch)

    def _complete(self, transfer: Transfer, transport: EdgeTransport | LocalTransport) -> None:
        transport.complete(self._state.sent.pop(transfer))

    def _compute(self, action: Action, runner: StageRunner) -> None:
        with naming_lost_peers(f"values of {action} among the ranks of stage {action.stage}"):
            runner.run(action.kind, action.microbatch, self._state)

    def _free(self, action: Action, runner: StageRunner) -> None:
        runner.free(action.kind, action.microbatch, self._state)
        if action.kind == "F":
            for edge in runner.edges_read:
                key = edge, action.microbatch
                self._unread[key] -= 1
                if self._unread[key] == 0:
                    del self._unread[key], self._state.values[key]

    def _reduce(self, runner: StageRunner) -> None:
        """Begin to sum the stage's gradients over all ranks that share its parameters.

        Raises:
            PeerLostError: another rank died.
        """
        sums = dict(zip(runner.parameters, self._state.sums.pop(runner.stage.index), strict=True))
        with naming_lost_peers(f"gradients of stage {runner.stage.index} to their sums"):
            self._reductions.append(StageReduction(sums, self._plans[runner.stage.index], self._mesh))

    def _finish_gradients(self) -> dict[str, Tensor]:
        """Send gradients of tied parameters to their owners, sum them over batch shards, and wait for all others."""
        shared: dict[str, Tensor] = {}
        for reduction in self._reductions:
            reduction.scattered()
            for name, gradient in reduction.shared.items():
                shared[name] = shared[name] + gradient if name in shared else gradient
        self._tied.reduce(shared)
        of_shared = AxisReductions(shared, self._shared_sums, self._mesh)
        finished = [*(reduction.finish() for reduction in self._reductions), of_shared.finish()]
        return {name: gradient for gradients in finished for name, gradient in gradients.items()}

    def _begin_loss(self, results: Mapping[int, Sequence[Tensor]]) -> LossMean | None:
        if self._loss is None:
            return None
        return begin_mean(results.get(self._loss.position, ()), self._loss, self._mesh, self._microbatches)
