"""A step from the graphs of all layers or, if a model has many equal ones, extrapolated from two models with fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from fxpar.ir.overlap_options import Fuse, Overlap
from fxpar.planner.layers import Layers, extrapolate, of_all_layers, sample_counts, with_layers
from fxpar.planner.step_model import DEFAULT_OVERLAP, DividedStep, Estimate, MemoryPolicy, StepModel


class SampledStep:
    """The step of `model` with `layers` equal layers in `num_stages` stages.

    Args:
        make: returns the model of a step of the given model, of all layers or of fewer.
        layers: None if all graphs are to be made.
    """

    def __init__(
        self, model: nn.Module, layers: Layers | None, num_stages: int, make: Callable[[nn.Module], StepModel]
    ) -> None:
        self._layers = layers
        self._counts = sample_counts(layers, num_stages)
        if self._counts is None or layers is None:
            self.models = [_anew(make, model)]
        else:
            self.models = [_anew(make, with_layers(model, layers, count)) for count in self._counts]

    def memory_policies(self) -> list[MemoryPolicy]:
        """See `StepModel`."""
        return self.models[0].memory_policies()

    @property
    def is_whole(self) -> bool:
        """Whether the graphs are those of all layers."""
        return len(self.models) == 1

    def first_that_fits(
        self,
        schedule: str,
        policies: Iterable[MemoryPolicy],
        budget_bytes: float,
        overlap: Overlap = DEFAULT_OVERLAP,
        fuse: Fuse = True,
    ) -> Estimate:
        """The estimate by the first of the policies that fits, or the last: memory is known before times are."""
        steps = self.divide(schedule, policies, budget_bytes, overlap)
        found = [model.estimate(step, fuse) for model, step in zip(self.models, steps, strict=True)]
        if self._counts is None or self._layers is None:
            return found[0]
        return extrapolate(found[0], found[1], self._counts, self._layers)

    def divide(
        self, schedule: str, policies: Iterable[MemoryPolicy], budget_bytes: float, overlap: Overlap = DEFAULT_OVERLAP
    ) -> list[DividedStep]:
        """The step of each of the `models`, by the first of the policies that fits for all layers, or the last."""
        steps: list[DividedStep] = []
        for policy in policies:
            steps = [model.divide(schedule, policy, overlap) for model in self.models]
            if self._of_all([step.peak_bytes for step in steps]) <= budget_bytes:
                break
        return steps

    def _of_all(self, figures: Sequence[float]) -> float:
        """A figure of the whole model, from those of the models whose graphs are made."""
        if self._counts is None or self._layers is None:
            return figures[0]
        return of_all_layers(figures[0], figures[1], self._counts, self._layers)


def _anew(make: Callable[[nn.Module], StepModel], model: nn.Module) -> StepModel:
    torch.compiler.reset()  # else Dynamo gives up on a model that it has compiled for so many meshes
    return make(model)
