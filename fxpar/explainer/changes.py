"""The changes to try for a model: which parameters could have hints, and the analytic estimates of other meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from fxpar.explainer.neighbours import (
    Change,
    layout_changes,
    mesh_changes,
    microbatch_changes,
    option_changes,
    schedule_changes,
)
from fxpar.explainer.proposals import LEAST_GAIN
from fxpar.explainer.setup import Setup
from fxpar.explainer.shipped_plan_facts import ShippedPlanFacts
from fxpar.explainer.step_facts import RepeatedWork
from fxpar.hardware.cluster import Cluster
from fxpar.ir.hints import Spec
from fxpar.ir.precision import Precision
from fxpar.planner.analytic_estimate import AnalyticEstimate
from fxpar.planner.configuration import Configuration
from fxpar.planner.search import analytic_estimates
from fxpar.report.facts import module_pattern

_MOST_MODULES = 2
"""Of the modules whose work ranks repeat, hints for so many are tried."""


@dataclass(frozen=True)
class Changes:
    """The changes of `setup` to try.

    batch_size, rows: of the global batch; the first is None if it cannot be divided.
    fits: whether the step fits into memory as it is.
    """

    model: nn.Module
    setup: Setup
    cluster: Cluster
    batch_size: int | None
    rows: int
    precision: Precision | None
    fits: bool

    @property
    def of_options(self) -> list[Change]:
        """Those for which no graphs are planned anew, but for other numbers of stages."""
        return [*option_changes(self.setup, fits=self.fits), *schedule_changes(self.setup)]

    @property
    def of_microbatches(self) -> list[Change]:
        """Other numbers of microbatches on the same mesh."""
        return list(microbatch_changes(self.setup, self.batch_size, fits=self.fits))

    def of_layouts(self, repeated: Sequence[RepeatedWork], step_us: float, shipped: ShippedPlanFacts) -> list[Change]:
        """Those of layouts; hints are tried for modules whose work is repeated for a noticeable part of the step."""
        costly = [each for each in repeated if each.wasted_us >= LEAST_GAIN * step_us]
        hints: dict[str, list[Spec]] = {}
        for work in costly:
            for pattern, specs in self._hints_for(work).items():
                if len(hints) < _MOST_MODULES:
                    hints.setdefault(pattern, specs)
        return list(layout_changes(self.setup, ships_plan=shipped.status != "none", hints=hints))

    def _hints_for(self, work: RepeatedWork) -> dict[str, list[Spec]]:
        """By pattern of the matrices in modules, hints that shard their rows or their columns."""
        found: dict[str, list[Spec]] = {}
        (axis, *_), sizes = work.axes, self.setup.mesh
        for name, parameter in self.model.named_parameters():
            module, _, attribute = name.rpartition(".")
            if parameter.dim() == 2 and module_pattern(module) == work.modules:
                rows, columns = (size % sizes[axis] == 0 for size in parameter.shape)
                specs: list[Spec] = [(axis, None)] * rows + [(None, axis)] * columns
                found.setdefault(f"{work.modules}.{attribute}" if module else attribute, specs)
        return found

    @cached_property
    def of_meshes(self) -> list[Change]:
        """Other meshes, some with several numbers of microbatches."""
        return list(mesh_changes(self.setup, self.batch_size))

    @property
    def analytic_estimates(self) -> Mapping[Configuration, AnalyticEstimate]:
        """Of `of_meshes` and the setup itself."""
        possible = {change.setup.configuration for change in self.of_meshes} | {self.setup.configuration}
        ordered = sorted(possible, key=str)
        schedules = [self.setup.schedule]
        return analytic_estimates(self.model, ordered, self.rows, self.cluster, schedules, self.precision)
