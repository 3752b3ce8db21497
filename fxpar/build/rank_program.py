"""The program of one rank, before its graphs are lowered: data, which later launches find on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.build.task import Task
from fxpar.cache.derive_once import find, keep
from fxpar.costs.model_arithmetic import Arithmetic
from fxpar.model.buffers import record_buffers
from fxpar.passes.stage_graphs import RunGraphs
from fxpar.resharding.pipeline import Reshard
from fxpar.runtime.results import ResultSpec
from fxpar.schedule import Program
from fxpar.world.agreement import of_all_ranks


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank runs in a step, and what it shares with others.

    stages: the graphs of this rank's stages.
    program: the instructions of its pipe rank.
    reshards: of all values that cross between stages, on all ranks.
    results: how to make the results of the step.
    buffer_stages: of buffers that the forward changes, by name.
    arithmetic: that of the forwards of all stages for one microbatch, and that of their backwards.
    evaluation: the instructions of a step that runs the forwards alone, if memory suffices; None without a backward.
    warnings: those that its derivation gave.
    """

    stages: tuple[RunGraphs, ...]
    program: Program
    reshards: tuple[Reshard, ...]
    results: tuple[ResultSpec, ...]
    buffer_stages: Mapping[str, int]
    arithmetic: tuple[Arithmetic, Arithmetic]
    evaluation: Program | None = None
    warnings: tuple[str, ...] = ()


def kept_program(task: Task) -> RankProgram | None:
    """This rank's program of an earlier launch; None unless every rank finds its own. A collective of all ranks.

    A rank that derives its program calls collectives, so either all ranks do or none does.
    """
    found: RankProgram | None = find(_question(task)) if task.may_be_kept else None
    if not all(of_all_ranks(found is not None)):
        return None
    assert found is not None
    record_buffers(found.buffer_stages, task.distribution)
    return found


def keep_program(task: Task, program: RankProgram) -> None:
    """Keep `program` for later launches, if it may be."""
    if task.may_be_kept:
        keep(_question(task), program)


def _question(task: Task) -> str:
    return f"rank program\n{task.question}"
