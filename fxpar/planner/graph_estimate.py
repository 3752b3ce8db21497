"""Estimate a configuration from its graphs: they are made as they would run, and the step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpar.hardware.cluster import Cluster
from fxpar.ir.precision import Precision
from fxpar.model.resolve_layouts import Layouts
from fxpar.planner.configuration import Configuration
from fxpar.planner.imagined_mesh import imagined_mesh
from fxpar.planner.layers import Layers, extrapolate, of_all_layers, sample_counts, with_layers
from fxpar.planner.step_model import DividedStep, Estimate, StepModel


@dataclass(frozen=True, slots=True)
class GraphEstimator:
    """Estimates configurations from graphs as they would run, on imagined ranks.

    layers: equal layers; graphs are made for a few of them and extrapolated. None: graphs are made for all.
    others: as in `plan`.
    """

    model: nn.Module
    batch: Sequence[Any] | Mapping[str, Any]
    cluster: Cluster
    budget_bytes: float
    layouts: Layouts
    batch_dims: Mapping[str | int, int | None] | None
    precision: Precision | None
    schedules: Sequence[str]
    layers: Layers | None

    def estimates(self, configuration: Configuration) -> list[Estimate]:
        """For each schedule that makes a difference, the estimate by the first memory policy that fits, or the last."""
        pipe = configuration.mesh["pipe"]
        counts = sample_counts(self.layers, pipe)
        if counts is None or self.layers is None:
            models = [self._step_of(self.model, configuration)]
        else:
            models = [self._step_of(with_layers(self.model, self.layers, count), configuration) for count in counts]
        names = self.schedules if pipe > 1 else self.schedules[:1]
        return [self._first_that_fits(models, counts, name) for name in names]

    def _step_of(self, model: nn.Module, configuration: Configuration) -> StepModel:
        torch.compiler.reset()  # else Dynamo gives up on a model that it has compiled for so many meshes
        mesh = imagined_mesh(configuration.mesh, self.cluster)
        return StepModel(
            model, self.batch, mesh, configuration.microbatches, self.layouts, self.batch_dims, self.precision
        )

    def _first_that_fits(self, models: Sequence[StepModel], counts: tuple[int, int] | None, schedule: str) -> Estimate:
        """The estimate by the first memory policy that fits, or the last: memory is known before times are."""
        steps: list[DividedStep] = []
        for way in models[0].memory_policies():
            steps = [model.divide(schedule, way) for model in models]
            if self._of_all([step.peak_bytes for step in steps], counts) <= self.budget_bytes:
                break
        found = [model.estimate(step) for model, step in zip(models, steps, strict=True)]
        if counts is None or self.layers is None:
            return found[0]
        return extrapolate(found[0], found[1], counts, self.layers)

    def _of_all(self, figures: Sequence[float], counts: tuple[int, int] | None) -> float:
        """A figure of the whole model, from those of the models whose graphs are made."""
        if counts is None or self.layers is None:
            return figures[0]
        return of_all_layers(figures[0], figures[1], counts, self.layers)
