"""Make a model's plan: from its captured forward, or, without example inputs, from hints and the order of modules."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fxpar.build.planned_stages import may_be_kept, plan_question, planned_stages
from fxpar.cache.derive_once import find, keep
from fxpar.cache.own_warnings import give, recorded_warnings
from fxpar.costs.prices import prices_of
from fxpar.errors import InvalidStagesError, StageNotFoundError
from fxpar.ir.capture import Capture
from fxpar.ir.hints import Grouped, Spec
from fxpar.ir.layout import AXES, Layout, Shard
from fxpar.ir.plan import Plan, PlannedParameter
from fxpar.ir.stage import PlannedStage, PortKind
from fxpar.model.buffers import assign_buffers, record_buffers
from fxpar.model.distribution import Distribution
from fxpar.model.logical_parameters import LogicalParameter
from fxpar.passes.settle_capture import settle_for_training
from fxpar.passes.shard_storage import stored
from fxpar.passes.stages.balance_stages import balance_stages
from fxpar.schedule.choose_schedule import choose_placement, num_stages_of
from fxpar.world.mesh import Mesh


def make_plan(
    distribution: Distribution,
    stages: Sequence[str] | int | None,
    schedule: str,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
) -> Plan:
    """The plan of `distribution`'s model.

    Raises:
        InvalidStagesError: the schedule cannot run so many stages on the mesh, or `stages` is a count and there are no
            example inputs.
    """
    given = num_stages_of(schedule, distribution.mesh.pipe) if stages is None else stages
    num_stages = given if isinstance(given, int) else len(given) + 1
    distribution.placement = choose_placement(schedule, num_stages, distribution.mesh.pipe)
    if example_inputs is None:
        boundaries = _boundaries_without_capture(given)
        parameters = _parameters_without_capture(distribution, boundaries)
        _warn_of_replicas(distribution, parameters)
    else:
        traced = distribution.tracer.capture(distribution.mesh.device_type, example_inputs)
        capture = settle_for_training(traced, distribution)
        prices = prices_of(distribution.mesh)
        boundaries = balance_stages(capture, given, prices) if isinstance(given, int) else tuple(given)
        parameters = _parameters(capture, distribution, boundaries)
    sizes, microbatches, placement = distribution.mesh.sizes, distribution.microbatches, distribution.placement
    return Plan(boundaries, sizes, microbatches, schedule, parameters, placement)


@dataclass(frozen=True, slots=True)
class _Owners:
    """What `distribute` needs to know of the planned stages, and the warnings of the planning."""

    parameters: dict[str, PlannedParameter]
    buffer_stages: Mapping[str, int]
    warnings: tuple[str, ...]


def _parameters(capture: Capture, distribution: Distribution, boundaries: Sequence[str]) -> dict[str, PlannedParameter]:
    """The owner and layout of each parameter; a launch that finds them does not read the planned stages."""
    planned = cache(lambda: _stages_before_plan(capture, distribution, boundaries))
    distribution.planned[capture.signature] = planned
    question = f"owners\n{plan_question(capture, distribution, boundaries)}"
    found: _Owners | None = find(question) if may_be_kept(capture) else None
    if found is not None:
        give(found.warnings)
        record_buffers(found.buffer_stages, distribution)
        return found.parameters
    with recorded_warnings() as texts:
        stages = planned()
    assign_buffers(capture, stages, distribution)
    parameters = parameters_of(stages, distribution)
    if may_be_kept(capture):
        keep(question, _Owners(parameters, distribution.buffer_stages, tuple(texts)))
    return parameters


def _stages_before_plan(
    capture: Capture, distribution: Distribution, boundaries: Sequence[str]
) -> tuple[PlannedStage, ...]:
    """The stages as they are planned in order to make the plan, also where it is known already."""
    with distribution.before_plan():
        return planned_stages(capture, distribution, boundaries)


def parameters_of(stages: Sequence[PlannedStage], distribution: Distribution) -> dict[str, PlannedParameter]:
    """The owner and layout of each parameter, as in the first stage that uses it; the last stage owns unused ones."""
    last = stages[-1].joint.index
    found = {
        name: PlannedParameter(last, _as_hinted(parameter, distribution))
        for name, parameter in distribution.parameters.items()
    }
    for stage in reversed(stages):
        for port, layout in stage.border.inputs.items():
            if port.kind is PortKind.PARAMETER:
                found[port.name] = PlannedParameter(stage.joint.index, layout)
    return found


def _boundaries_without_capture(stages: Sequence[str] | int) -> tuple[str, ...]:
    if not isinstance(stages, int):
        return tuple(stages)
    if stages == 1:
        return ()
    raise InvalidStagesError(
        f"stages: a count ({stages}) needs `example_inputs`, to balance the stages; "
        "pass the forward's arguments (meta tensors do), or name the modules that open a stage"
    )


def _parameters_without_capture(distribution: Distribution, boundaries: Sequence[str]) -> dict[str, PlannedParameter]:
    """Stages by the order in which modules were registered; parameters are sharded as hinted, otherwise replicated."""
    order = [path for path, _ in distribution.model.named_modules()]
    for boundary in boundaries:
        if boundary not in order:
            raise StageNotFoundError(boundary, order[1:], "names no module of the model")
    starts = sorted(order.index(boundary) for boundary in boundaries)
    planned = {}
    for fqn, parameter in distribution.parameters.items():
        position = order.index(fqn.rpartition(".")[0])
        stage = sum(start <= position for start in starts)
        planned[fqn] = PlannedParameter(stage, _as_hinted(parameter, distribution))
    return planned


def _warn_of_replicas(distribution: Distribution, planned: Mapping[str, PlannedParameter]) -> None:
    """Warn of parameters that are replicated over y and x because layouts were not searched for."""
    if distribution.mesh.y * distribution.mesh.x == 1:
        return
    automatic = {"y", "x"}
    whole = [
        parameter
        for name, parameter in distribution.parameters.items()
        if automatic.isdisjoint(axis for axis, _ in planned[name].layout.axes)
    ]
    megabytes = sum(math.prod(p.shape) * p.dtype.itemsize for p in whole) / 1e6
    if whole:
        warnings.warn(
            f"without `example_inputs`, {len(whole)} parameters without a hint ({megabytes:.1f} MB) stay whole on "
            "every rank of their stage, and plain hints shard fused weights from their start; pass `example_inputs` to "
            "distribute (meta tensors do), or hint these parameters, too",
            stacklevel=4,  # the caller of `distribute`
        )


def _as_hinted(parameter: LogicalParameter, distribution: Distribution) -> Layout:
    spec = distribution.hints.parameters.get(parameter.fqn, ())
    return stored(layout_as_hinted(parameter.shape, spec, distribution.mesh), distribution.mesh.z)


def layout_as_hinted(shape: Sequence[int], spec: Spec, mesh: Mesh) -> Layout:
    """The layout that a hint denotes literally: each axis shards its whole dim, or each of the dim's groups."""
    shards: dict[str, Shard] = {}
    for dim, entry in enumerate(spec):
        axis, outer = (entry.axis, entry.groups) if isinstance(entry, Grouped) else (entry, 1)
        if axis is not None and mesh.sizes[axis] > 1:
            shards[axis] = Shard(dim, mesh.sizes[axis], outer)
    return Layout(tuple(shape), tuple((axis, shards[axis]) for axis in AXES if axis in shards))
