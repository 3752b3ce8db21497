"""Pipelines whose stages sleep in place of computing, to measure the schedule and the communication alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from fxpar.costs.transfer_costs import transfer_costs
from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout
from fxpar.ir.stage import CompiledSplit, CompiledStage, Port, PortKind, StageBorder
from fxpar.resharding.pipeline import Crossing, Reshard
from fxpar.runtime.executor import Executor
from fxpar.runtime.loss import Loss
from fxpar.runtime.profiler_ranges import Observe
from fxpar.runtime.wiring import connect
from fxpar.schedule import Costs, Kind, Schedule, chain, check_programs, lower
from fxpar.world.mesh import Mesh, init_mesh

_DTYPE = torch.float32
_LOSS = Port(PortKind.RESULT, "0")
_WEIGHT = Port(PortKind.PARAMETER, "weight")
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Sleeping:
    """A chain of stages that sleep for these times, per microbatch.

    Each sends `num_bytes` to the next stage per microbatch, and receives as many back.
    """

    num_stages: int
    num_bytes: int
    forward_ms: float = 20.0
    input_gradients_ms: float = 20.0
    weight_gradients_ms: float = 20.0

    @property
    def compute_us(self) -> dict[Kind, float]:
        """Microseconds by kind of action."""
        parts_ms = self.input_gradients_ms, self.weight_gradients_ms
        ms: dict[Kind, float] = {"F": self.forward_ms, "I": parts_ms[0], "W": parts_ms[1], "B": sum(parts_ms)}
        return {kind: 1e3 * each for kind, each in ms.items()}

    def costs(self, network: Network, strategy: str = "broadcast") -> Costs:
        """The costs for the simulator, with each stage on a host of its own."""
        mesh = Mesh(pipe=self.num_stages, hosts=tuple(range(self.num_stages)))
        times = dict.fromkeys(range(self.num_stages), self.compute_us)
        transfers = transfer_costs(self._reshards(mesh, network, strategy), network)
        return Costs(tuple(range(self.num_stages)), chain(self.num_stages), times, transfers)

    def executor(self, schedule: Schedule, network: Network, strategy: str = "broadcast") -> SleepingStep:
        """This rank's step; a collective of all ranks, one per stage."""
        mesh, edges = init_mesh(pipe=self.num_stages), chain(self.num_stages)
        programs = lower(schedule, edges)
        check_programs(programs, schedule, edges)
        own = [self._stage(index) for index in schedule.stages_of(mesh.rank)]
        reshards = self._reshards(mesh, network, strategy)
        connections = connect(reshards, own, mesh, schedule.num_microbatches, _TIMEOUT, answered=False)
        loss = Loss(0, _DTYPE)
        program = programs[mesh.rank]
        return SleepingStep(Executor(mesh, program, own, connections, schedule.num_microbatches, {}, loss))

    def _reshards(self, mesh: Mesh, network: Network, strategy: str) -> list[Reshard]:
        layout = Layout((self.num_bytes // _DTYPE.itemsize,))
        ways = [
            (number, edge.name, *ends)
            for number, edge in enumerate(chain(self.num_stages))
            for ends in ((edge.source, edge.targets, False), (edge.targets[0], (edge.source,), True))
        ]
        return [
            Crossing(Port(PortKind.EDGE, name), is_gradient, source, targets, layout, (layout,), _DTYPE).planned(
                mesh, network, strategy
            )
            for _, name, source, targets, is_gradient in ways
        ]

    def _stage(self, index: int) -> CompiledStage:
        entering = [Port(PortKind.EDGE, f"out{index - 1}")] if index else []
        leaving = [Port(PortKind.EDGE, f"out{index}")] if index < self.num_stages - 1 else [_LOSS]
        piece, weight, loss = self._piece(), torch.zeros(1), torch.zeros(())
        made = loss if leaving == [_LOSS] else piece
        gradients = [*entering, _WEIGHT]
        us = self.compute_us
        whole = Layout((1,))
        border = StageBorder({}, {}, {}, {_WEIGHT: whole})
        return CompiledStage(
            index,
            partial(_sleep, us["F"], [made]),
            partial(_sleep, us["B"], [*([piece] if entering else []), weight]),
            (*entering, _WEIGHT),
            (*leaving,),
            (*leaving,),
            (*gradients,),
            border,
            (*(piece for _ in entering), weight),
            (made,),
            (*(_DTYPE for _ in entering), weight.dtype),
            CompiledSplit(
                partial(_sleep, us["I"], [piece] if entering else []), partial(_sleep, us["W"], [weight]), (), ()
            ),
        )

    def _piece(self) -> Tensor:
        return torch.zeros(self.num_bytes // _DTYPE.itemsize, dtype=_DTYPE)


def _sleep(duration_us: float, made: Sequence[Tensor], *given: Tensor) -> list[Tensor]:
    time.sleep(1e-6 * duration_us)
    return list(made)


@dataclass(frozen=True, slots=True)
class SleepingStep:
    """A step that can be run, and observed if `observe` is given."""

    executor: Executor

    def __call__(self, observe: Observe | None = None) -> None:
        with torch.no_grad():
            self.executor.run({_WEIGHT.name: torch.zeros(1)}, {}, {}, observe)
