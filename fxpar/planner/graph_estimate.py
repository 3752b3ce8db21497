"""Estimate a configuration from its graphs: they are made as they would run, and the step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fxpar.hardware.cluster import Cluster
from fxpar.ir.precision import Precision
from fxpar.model.resolve_layouts import Layouts
from fxpar.planner.configuration import Configuration
from fxpar.planner.imagined_mesh import imagined_mesh
from fxpar.planner.layers import Layers
from fxpar.planner.sampled_step import SampledStep
from fxpar.planner.step_model import Estimate, StepModel


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
        step = SampledStep(self.model, self.layers, pipe, partial(self._step_of, configuration))
        names = self.schedules if pipe > 1 else self.schedules[:1]
        return [step.first_that_fits(name, step.memory_policies(), self.budget_bytes) for name in names]

    def _step_of(self, configuration: Configuration, model: nn.Module) -> StepModel:
        mesh = imagined_mesh(configuration.mesh, self.cluster)
        return StepModel(
            model, self.batch, mesh, configuration.microbatches, self.layouts, self.batch_dims, self.precision
        )
