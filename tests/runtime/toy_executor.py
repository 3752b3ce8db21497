"""This rank's executor of the toy pipeline's stages, and a step that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from fxpar.ir.stage import CompiledStage
from fxpar.ir.tiles import shard_of
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.resharding.pipeline import Pipeline
from fxpar.runtime.executor import Executor, StepResult
from fxpar.runtime.loss import Loss
from fxpar.runtime.wiring import Connections, connect
from fxpar.schedule import Schedule, check_programs, lower
from fxpar.world.mesh import Mesh
from tests.runtime.toy_pipeline import Toy, owners
from tests.runtime.toy_stages import as_columns, planned_stages


def pipeline(toy: Toy, mesh: Mesh, schedule: Schedule) -> Pipeline:
    """The stages and what moves between them."""
    stages = planned_stages(toy, with_backward=schedule.has_backward)
    return insert_reshards(stages, mesh, owners(toy), schedule.placement)


def make_connections(
    toy: Toy, mesh: Mesh, schedule: Schedule, own: Sequence[CompiledStage], timeout_s: float = 60
) -> Connections:
    """This rank's connections, wired as a compiled model's are."""
    timeout = timedelta(seconds=timeout_s)
    reshards = pipeline(toy, mesh, schedule).reshards
    return connect(reshards, own, mesh, schedule.num_microbatches, timeout, answered=False)


def make_executor(
    toy: Toy, mesh: Mesh, schedule: Schedule, own: Sequence[CompiledStage], connections: Connections
) -> Executor:
    """This rank's executor of its stages."""
    edges = pipeline(toy, mesh, schedule).edges
    programs = lower(schedule, edges)
    check_programs(programs, schedule, edges)
    loss = Loss(0, torch.double)
    program = programs[mesh.coordinate["pipe"]]
    return Executor(mesh, program, own, connections, schedule.num_microbatches, {"0": 0}, loss)


def run_step(
    toy: Toy, executor: Executor, mesh: Mesh, own: Sequence[CompiledStage], values: Mapping[str, Tensor], count: Tensor
) -> StepResult:
    """One step of this rank's `own` stages on its pieces of `values`; `count` is its buffer."""
    stages, coordinate = {stage.index for stage in own}, mesh.coordinate
    parameters = {
        name: as_columns(shard_of(values[name], planned.layout, coordinate).clone())
        for name, planned in owners(toy).items()
        if planned.stage in stages
    }
    shard = values["0"].chunk(mesh.data)[coordinate["data"]]
    with torch.no_grad():
        return executor.run(parameters, {"count": count}, {"0": shard, "1": values["1"]})
