"""The compiled stages of this rank with their transports: those of a training step serve evaluations, too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch

from fxpar.build.rank_program import RankProgram
from fxpar.build.task import Task
from fxpar.ir.stage import CompiledStage
from fxpar.progress.phases import as_phase
from fxpar.runtime.step import Step
from fxpar.runtime.wiring import Connections, connect
from fxpar.schedule import Program
from fxpar.world.agreement import of_all_ranks


@dataclass(frozen=True, slots=True)
class ConnectedStages:
    """What a step runs on this rank: `program` calls `stages`, and moves values over `connections`.

    derived: what the stages were lowered from.
    """

    program: Program
    stages: Sequence[CompiledStage]
    connections: Connections
    derived: RankProgram


_of_training: WeakKeyDictionary[Step, tuple[Hashable, ConnectedStages]] = WeakKeyDictionary()
"""For each training step of this process, what it was built for, and what it runs."""


@as_phase
def connect_stages(task: Task, derived: RankProgram, stages: Sequence[CompiledStage]) -> ConnectedStages:
    """Open the transports between stages; a collective of all ranks."""
    mesh, microbatches = task.mesh, task.microbatches
    timeout = timedelta(seconds=task.options.transfer_timeout_s)
    connections = connect(derived.reshards, stages, mesh, microbatches, timeout, answered=task.loss is None)
    return ConnectedStages(derived.program, stages, connections, derived)


def remember_training(step: Step, task: Task, connected: ConnectedStages) -> None:
    """Let evaluations run the forward graphs of the training step `step`, as long as it is in use."""
    _of_training[step] = _purpose(task), connected


def stages_of_training(task: Task) -> ConnectedStages | None:
    """The forwards of a training step for the same capture and options, to evaluate by; they drop what they save.

    None unless every rank has one, and memory suffices. A collective of all ranks.
    """
    purpose = _purpose(task)
    known = next((connected for found, connected in _of_training.values() if found == purpose), None)
    program = None if known is None else known.derived.evaluation
    if not all(of_all_ranks(program is not None)):
        return None
    assert known is not None
    assert program is not None
    stages = [stage.without_backward for stage in known.stages]
    return ConnectedStages(program, stages, known.connections.without_gradients, known.derived)


def _purpose(task: Task) -> Hashable:
    """What a training step for the capture and options of `task` depends on.

    The text says it all but for which tensors the buffers are, and for what users define: that is equal in one capture
    alone. Objects are told apart by identity: a training step that is in use keeps its own.
    """
    with torch.inference_mode(False), torch.enable_grad():
        question = (task if task.with_backward else replace(task, with_backward=True)).question
    capture = task.capture
    buffers = tuple((port.name, id(buffer)) for port, buffer in capture.buffers.items())
    return question, buffers, None if capture.is_self_contained else id(capture)
