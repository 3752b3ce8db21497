"""Estimate setups, one after another, by the planner's model of a step, from the graphs of all layers.

`fxpar plan` may extrapolate from models with fewer layers. Here graphs are those of the whole model: where stages are
uneven, an extrapolated step of a pipeline was found to be a sixth too long, more than many changes gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpar.explainer.setup import Setup
from fxpar.hardware.cluster import Cluster
from fxpar.ir.precision import Precision
from fxpar.planner.imagined_mesh import imagined_mesh
from fxpar.planner.step_model import DividedStep, Estimate, SimulatedStep, StepModel
from fxpar.schedule.choose_schedule import choose_placement, num_stages_of


@dataclass(slots=True)
class SetupEstimator:
    """Estimates setups of one model and batch on a cluster; the arguments are those of `explain`."""

    model: nn.Module
    batch: Sequence[Any] | Mapping[str, Any]
    cluster: Cluster
    budget_bytes: float
    batch_dims: Mapping[str | int, int | None] | None
    precision: Precision | None
    _latest: tuple[object, StepModel] | None = field(default=None, init=False)

    def estimate(self, setup: Setup) -> Estimate:
        """The estimate of `simulate`."""
        return self.simulate(setup)[1].estimate

    def simulate(self, setup: Setup) -> tuple[StepModel, SimulatedStep]:
        """The step by the first memory policy that fits, or the last.

        Raises: what planning raises.
        """
        model = self._model_of(setup)
        return model, model.simulate(self._divide(model, setup), setup.options.fuse)

    def _divide(self, model: StepModel, setup: Setup) -> DividedStep:
        *others, last = setup.memory_policies
        for policy in others:
            divided = model.divide(setup.schedule, policy, setup.options.overlapping)
            if divided.peak_bytes <= self.budget_bytes:
                return divided
        return model.divide(setup.schedule, last, setup.options.overlapping)

    def _model_of(self, setup: Setup) -> StepModel:
        """That of the latest setup, if the graphs are the same until the schedule divides them."""
        pipe = setup.mesh["pipe"]
        num_stages = num_stages_of(setup.schedule, pipe) if setup.stages is None else _count(setup.stages)
        key = setup.configuration, setup.stages, choose_placement(setup.schedule, num_stages, pipe), setup.layouts
        if self._latest is None or self._latest[0] != key:
            self._latest = None  # frees graphs before others are made
            torch.compiler.reset()  # else Dynamo gives up on a model that it has compiled for so many meshes
            self._latest = key, self._make(setup)
        return self._latest[1]

    def _make(self, setup: Setup) -> StepModel:
        return StepModel(
            self.model,
            self.batch,
            imagined_mesh(setup.mesh, self.cluster),
            setup.microbatches,
            setup.layouts,
            self.batch_dims,
            self.precision,
            setup.stages,
            setup.schedule,
        )


def _count(stages: Sequence[str] | int) -> int:
    return stages if isinstance(stages, int) else len(stages) + 1
