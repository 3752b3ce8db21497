"""Estimate setups, one after another, by the planner's model of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from fxpar.explainer.setup import Setup
from fxpar.hardware.cluster import Cluster
from fxpar.ir.precision import Precision
from fxpar.model.resolve_layouts import given_patterns
from fxpar.planner.imagined_mesh import imagined_mesh
from fxpar.planner.layers import Layers, layers_to_sample
from fxpar.planner.sampled_step import SampledStep
from fxpar.planner.step_model import Estimate, SimulatedStep, StepModel
from fxpar.schedule.choose_schedule import choose_placement, num_stages_of


@dataclass(slots=True)
class SetupEstimator:
    """Estimates setups of one model and batch on a cluster.

    whole: make the graphs of all layers; otherwise many equal ones are extrapolated, as by `fxpar.plan`.
    others: as in `explain`.
    """

    model: nn.Module
    batch: Sequence[Any] | Mapping[str, Any]
    cluster: Cluster
    budget_bytes: float
    batch_dims: Mapping[str | int, int | None] | None
    precision: Precision | None
    whole: bool
    _latest: tuple[object, SampledStep] | None = field(default=None, init=False)

    def estimate(self, setup: Setup) -> Estimate:
        """The estimate by the first memory policy that fits, or the last.

        Raises: what planning raises.
        """
        step, options = self._step_of(setup), setup.options
        policies = setup.memory_policies
        return step.first_that_fits(setup.schedule, policies, self.budget_bytes, options.overlapping, options.fuse)

    def simulate(self, setup: Setup) -> tuple[StepModel, SimulatedStep]:
        """The step with the graphs of all layers, by the same policy.

        Raises: what planning raises.
        """
        step, options = self._step_of(setup), setup.options
        if not step.is_whole:
            step = SampledStep(self.model, None, 1, partial(self._make, setup))
        (divided,) = step.divide(setup.schedule, setup.memory_policies, self.budget_bytes, options.overlapping)
        return step.models[0], step.models[0].simulate(divided, options.fuse)

    def _step_of(self, setup: Setup) -> SampledStep:
        """The step; that of the latest setup if its graphs are the same until the schedule divides them."""
        pipe = setup.mesh["pipe"]
        num_stages = num_stages_of(setup.schedule, pipe) if setup.stages is None else _count(setup.stages)
        placement = choose_placement(setup.schedule, num_stages, pipe)
        key = setup.configuration, setup.stages, placement, setup.layouts
        if self._latest is None or self._latest[0] != key:
            self._latest = None  # frees graphs before others are made
            # Stages that the user opens by name may be of any layers.
            sampled = None if self.whole or setup.stages is not None else self._layers(setup)
            self._latest = key, SampledStep(self.model, sampled, num_stages, partial(self._make, setup))
        return self._latest[1]

    def _layers(self, setup: Setup) -> Layers | None:
        return layers_to_sample(self.model, given_patterns(setup.layouts))

    def _make(self, setup: Setup, model: nn.Module) -> StepModel:
        return StepModel(
            model,
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
