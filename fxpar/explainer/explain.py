"""Explain how a model would train as a user has set it up, and which changes would help most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from fxpar.errors import ExplainingError
from fxpar.explainer.changes import Changes
from fxpar.explainer.proposals import Proposal, Trial, most_helpful, whole_parts, whole_step_us
from fxpar.explainer.setup import Setup, read_setup
from fxpar.explainer.setup_estimator import SetupEstimator
from fxpar.explainer.shipped_plan_facts import ShippedPlanFacts, shipped_plan_facts
from fxpar.explainer.step_facts import (
    AxisFacts,
    LayerCollectives,
    RankFacts,
    RepeatedWork,
    StageFacts,
    axis_facts,
    layer_collectives,
    rank_facts,
    repeated_work,
    stage_facts,
)
from fxpar.hardware.cluster import Cluster, read_cluster
from fxpar.ir.precision import Precision
from fxpar.model.resolve_layouts import Layouts
from fxpar.planner.imagined_mesh import imagined_world
from fxpar.planner.search import MOST_ESTIMATED, SECONDS, batch_size_and_rows
from fxpar.planner.step_model import Estimate
from fxpar.schedule import GivenSchedule


@dataclass(frozen=True, slots=True)
class Explanation:
    """The predicted step of a setup on a cluster, where its time and memory go, and what to change.

    estimate: of the step, without the optimizer's.
    budget_bytes: the memory of a rank.
    tried: all changes that fit into memory, the largest gain first.
    left_out: the others by their text, with the reason.
    """

    cluster: Cluster
    setup: Setup
    estimate: Estimate
    budget_bytes: float
    stages: Sequence[StageFacts]
    ranks: Sequence[RankFacts]
    axes: Sequence[AxisFacts]
    collectives: Sequence[LayerCollectives]
    repeated: Sequence[RepeatedWork]
    shipped_plan: ShippedPlanFacts
    tried: Sequence[Proposal] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def proposals(self) -> list[Proposal]:
        """The best change of each kind, at most three, the largest gain first."""
        return most_helpful(self.tried, fits=self.fits)

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of every rank."""
        return self.estimate.peak_bytes <= self.budget_bytes

    @property
    def step_us(self) -> float:
        """The predicted step, with the optimizer's."""
        return whole_step_us(self.estimate)

    @property
    def bound_by(self) -> str:
        """The largest part of the step."""
        return max(whole_parts(self.estimate), key=lambda part: part.time_us).label

    def with_trial(self, trial: Trial) -> Explanation:
        """The same with the changes that were tried."""
        return replace(self, tried=sorted(trial.tried, key=lambda each: -each.gain), left_out=trial.left_out)


def explain(
    model: nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    cluster: Cluster | str | Path,
    mesh: Mapping[str, int] | str,
    *,
    microbatches: int = 1,
    schedule: GivenSchedule = "eager-1f1b",
    stages: Sequence[str] | int | None = None,
    layouts: Layouts = None,
    batch_dims: Mapping[str | int, int | None] | None = None,
    precision: Precision | None = None,
    options: Mapping[str, Any] | None = None,
    memory_bytes: float | None = None,
    most: int = MOST_ESTIMATED,
    seconds: float = SECONDS,
    say: Callable[[str], None] | None = None,
) -> Explanation:
    """Predict a training step, say what its time is spent on, and what to change so that it becomes shorter.

    Nothing runs and nothing is allocated: this process need not be on the cluster. The compiler makes the graphs of all
    layers as they would run, and the step is simulated. Each change is estimated by the same model as in `plan`.

    Args:
        model: best built under `torch.device("meta")`; it is not changed.
        batch: the forward's arguments for all ranks together: a tuple, or a dict of keywords; meta tensors suffice.
        cluster: a file that `fxpar calibrate` wrote, or the name of a published one.
        mesh: axis -> size, or text such as "pipe=2 x=4".
        microbatches, schedule, stages, layouts, batch_dims, precision: as in `distribute`.
        options: as in `torch.compile`.
        memory_bytes: the memory limit of a rank; default: that of the options, or what the cluster's ranks have.
        most, seconds: limits on the number of changed meshes whose graphs are made, and on the time for all changes.
        say: called with messages about the progress.

    Raises:
        InvalidMeshError: the mesh is none.
        UnknownClusterError, InvalidClusterError
        ExplainingError: the mesh and the microbatches do not divide the batch.
        PlanningError: this process has joined a process group.
        and what `distribute` and `torch.compile` raise for the same arguments.
    """
    known = read_cluster(cluster)
    setup = read_setup(mesh, microbatches, schedule, stages, layouts, options)
    batch_size, rows = batch_size_and_rows(batch, batch_dims or {})
    _check_batch(setup, batch_size)
    budget = memory_bytes or setup.options.memory_bytes or known.usable_bytes
    estimator = SetupEstimator(model, batch, known, budget, batch_dims, precision)
    with imagined_world(math.prod(setup.mesh.values())):
        found = _explain_step(estimator, setup)
        changes = Changes(model, setup, known, batch_size, rows, precision, found.fits)
        trial = Trial(estimator.estimate, found.estimate, budget, seconds, say or _silent)
        trial.try_each(changes.of_options)
        trial.try_each(changes.of_microbatches)
        trial.try_each(changes.of_layouts(found.repeated, found.step_us, found.shipped_plan))
        trial.try_best_first(changes.of_meshes, changes.analytic_estimates, setup, most)
    return found.with_trial(trial)


def _explain_step(estimator: SetupEstimator, setup: Setup) -> Explanation:
    """The explanation of a step as it is, without changes."""
    model, step = estimator.simulate(setup)
    distribution = model.distribution
    return Explanation(
        estimator.cluster,
        setup,
        step.estimate,
        estimator.budget_bytes,
        stage_facts(model, step),
        rank_facts(step),
        axis_facts(distribution.mesh, step),
        layer_collectives(distribution.mesh, step),
        repeated_work(model.stages, distribution),
        shipped_plan_facts(estimator.model, distribution),
    )


def _check_batch(setup: Setup, batch_size: int | None) -> None:
    shards, microbatches = setup.mesh["data"] * setup.mesh["z"], setup.microbatches
    if batch_size is not None and batch_size % (shards * microbatches):
        raise ExplainingError(
            f"a batch of {batch_size} does not divide into {shards} batch shards of {microbatches} microbatches each",
            "change the batch, the mesh or the microbatches",
        )


def _silent(_: str) -> None:
    pass
