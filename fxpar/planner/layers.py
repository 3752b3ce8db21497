"""Models with many equal layers: the whole model is extrapolated from estimates of two with fewer layers."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from fxpar.costs.graph_time import Traffic
from fxpar.ir.plan import Plan, PlannedParameter
from fxpar.planner.step_model import Estimate
from fxpar.report.step_parts import StepParts


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` equal modules in the list at `path` of a model."""

    path: str
    count: int


def find_layers(model: nn.Module) -> Layers | None:
    """The longest list of modules of one class with parameters of the same names and shapes; None if there is none."""
    lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    alike = [Layers(path, len(each)) for path, each in lists if len(set(map(_kind, each))) == 1]
    return max(alike, key=lambda layers: layers.count, default=None)


def layers_to_sample(model: nn.Module, hints: Iterable[str]) -> Layers | None:
    """`find_layers`; None if one of the `hints` is for a single layer, which a model with fewer layers may lack."""
    layers = find_layers(model)
    if layers is None or any(re.match(rf"{re.escape(layers.path)}\.\d", hint) for hint in hints):
        return None
    return layers


def _kind(module: nn.Module) -> tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...]], ...]]:
    return type(module), tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def with_layers(model: nn.Module, layers: Layers, count: int) -> nn.Module:
    """A copy of `model` with the first `count` of its layers. Its forward must iterate over the list that has them."""
    fewer = copy.deepcopy(model)
    parent, _, name = layers.path.rpartition(".")
    kept = fewer.get_submodule(layers.path)
    assert isinstance(kept, nn.ModuleList), f"{layers.path} is a list of layers"
    setattr(fewer.get_submodule(parent), name, kept[:count])
    return fewer


def sample_counts(layers: Layers | None, pipe: int) -> tuple[int, int] | None:
    """Two numbers of layers to estimate: one and two per stage, but two at least; None if the model has no more."""
    fewer = max(2, pipe)
    return (fewer, 2 * fewer) if layers is not None and layers.count > 2 * fewer else None


def of_all_layers(few: float, more: float, counts: tuple[int, int], layers: Layers) -> float:
    """A figure of the whole model, extrapolated linearly from those of two models with `counts` of its layers."""
    return few + (layers.count - counts[0]) / (counts[1] - counts[0]) * (more - few)


def extrapolate(few: Estimate, more: Estimate, counts: tuple[int, int], layers: Layers) -> Estimate:
    """The estimate of the whole model, extrapolated linearly from those of two models with `counts` of its layers."""

    def of_all(first: float, second: float) -> float:
        return of_all_layers(first, second, counts, layers)

    def traffic_of_all(axis: str) -> Traffic:
        first, second = few.traffic.get(axis, Traffic()), more.traffic.get(axis, Traffic())
        return Traffic(
            round(of_all(first.num_collectives, second.num_collectives)),
            of_all(first.bytes_sent, second.bytes_sent),
            of_all(first.time_us, second.time_us),
        )

    exposed = {**few.parts.exposed_us, **more.parts.exposed_us}
    parts = StepParts(
        of_all(few.parts.compute_us, more.parts.compute_us),
        {axis: of_all(few.parts.exposed_us.get(axis, 0.0), more.parts.exposed_us.get(axis, 0.0)) for axis in exposed},
        of_all(few.parts.bubble_us, more.parts.bubble_us),
    )
    return Estimate(
        whole_plan(more.plan, counts[1], layers),
        more.options,
        of_all(few.step_us, more.step_us),
        of_all(few.compute_us, more.compute_us),
        math.ceil(of_all(few.peak_bytes, more.peak_bytes)),
        {axis: traffic_of_all(axis) for axis in {**few.traffic, **more.traffic}},
        parts,
        of_all(few.optimizer_us, more.optimizer_us),
    )


def whole_plan(plan: Plan, count: int, layers: Layers) -> Plan:
    """The plan for all layers, from one for `count` of them: stages have equally many, inner layers are equal.

    Two layouts may alternate from layer to layer, one the transpose of the other.
    """
    stages = len(plan.stages) + 1
    first = [math.ceil(layers.count * stage / stages) for stage in range(stages)]
    parameters: dict[str, PlannedParameter] = {}
    prefix = f"{layers.path}."
    for name, planned in plan.parameters.items():
        if not name.startswith(prefix):
            parameters[name] = planned
    for layer in range(layers.count):
        stage = max(stage for stage in range(stages) if first[stage] <= layer)
        for name, planned in _of_layer(plan.parameters, prefix, _like(layer, layers.count, count)).items():
            parameters[f"{prefix}{layer}.{name}"] = replace(planned, stage=stage)
    return replace(plan, stages=tuple(f"{prefix}{layer}" for layer in first[1:]), parameters=parameters)


def _like(layer: int, of: int, count: int) -> int:
    """The one of `count` layers that has the layouts for number `layer` of all `of`."""
    if layer in (0, of - 1):
        return 0 if layer == 0 else count - 1
    return 1 + (layer - 1) % 2


def _of_layer(parameters: Mapping[str, PlannedParameter], prefix: str, layer: int) -> dict[str, PlannedParameter]:
    own = f"{prefix}{layer}."
    return {name.removeprefix(own): planned for name, planned in parameters.items() if name.startswith(own)}
