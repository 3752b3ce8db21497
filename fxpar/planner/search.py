"""Find the mesh, the schedule and the number of microbatches with which a model trains fastest on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from fxpar.errors import PlanningError
from fxpar.hardware.cluster import Cluster, read_cluster
from fxpar.ir.layout import AXES
from fxpar.ir.precision import Precision
from fxpar.model.arguments import split_dim
from fxpar.model.resolve_layouts import Layouts, given_patterns
from fxpar.planner.analytic_estimate import (
    AnalyticEstimate,
    Matrix,
    analytic_bytes,
    analytic_estimate,
    matrices_of,
    rows_of,
)
from fxpar.planner.best_first import BestFirst
from fxpar.planner.configuration import SCHEDULES, SPLITTING, Configuration, candidates
from fxpar.planner.graph_estimate import GraphEstimator
from fxpar.planner.imagined_mesh import imagined_world
from fxpar.planner.layers import find_layers, layers_to_sample
from fxpar.planner.step_model import Estimate
from fxpar.report.step_parts import most_grown

MOST_ESTIMATED = 24
"""The default number of meshes whose graphs are made."""

SECONDS = 45.0
"""The default time limit for that; the next mesh is assumed to take as long as the longest so far."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A configuration with its best schedule, and why it is not the best of all; "" for the best."""

    configuration: Configuration
    estimate: Estimate
    drawback: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """The configurations that were estimated and fit, the fastest first, and those left out, each with the reason."""

    cluster: Cluster
    ranked: Sequence[Ranked]
    left_out: Mapping[Configuration, str]

    @property
    def best(self) -> Estimate:
        """The fastest; its `plan` can be passed to `distribute`."""
        return self.ranked[0].estimate


def plan(
    model: nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    cluster: Cluster | str | Path,
    num_ranks: int | None = None,
    *,
    layouts: Layouts = None,
    batch_dims: Mapping[str | int, int | None] | None = None,
    precision: Precision | None = None,
    axes: Sequence[str] = AXES,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
    memory_bytes: float | None = None,
    most: int = MOST_ESTIMATED,
    seconds: float = SECONDS,
    whole: bool = False,
    say: Callable[[str], None] | None = None,
) -> Ranking:
    """Rank the ways to train `model` on `num_ranks` ranks of a cluster by their predicted step time.

    Nothing runs and nothing is allocated: this process need not be on the cluster. All meshes are compared by the
    equations of Singh et al. for the model's matrices, corrected by the computation that graphs show. For the best,
    at most `most`, the graphs are made as they would run, and the step is simulated.

    Args:
        model: best built under `torch.device("meta")`; it is not changed.
        batch: the forward's arguments for all ranks together: a tuple, or a dict of keywords; meta tensors suffice.
        cluster: a file that `fxpar calibrate` wrote, or the name of a published one.
        num_ranks: default: those of one host.
        layouts, batch_dims, precision: as in `distribute`.
        axes: the axes of the mesh that may have several ranks.
        microbatches: numbers to try; by default some multiples of the pipe axis or, without a pipeline, as many as it
            takes to fit into memory.
        schedules: names of schedules to try, with one stage per rank.
        memory_bytes: the memory limit of a rank; default: what the cluster's ranks have for tensors.
        most, seconds: limits on the number of meshes whose graphs are made, and on the time for that; at least one is.
        whole: make the graphs of the whole model; by default, a model with a long list of equal layers is extrapolated
            from two with fewer of them.
        say: called with messages about the progress.

    Raises:
        PlanningError: nothing fits; it names what needs least. Or no mesh divides the batch, an axis does not exist, or
            this process has joined a process group.
        UnknownClusterError, InvalidClusterError
    """
    known = read_cluster(cluster)
    ranks = num_ranks or known.ranks_per_host
    budget = memory_bytes or known.usable_bytes
    size, rows = batch_size_and_rows(batch, batch_dims or {})
    everything = _candidates(ranks, size, microbatches, axes)
    too_large = _too_large(everything, matrices_of(model), budget)
    possible = [each for each in everything if each not in too_large]
    estimates = analytic_estimates(model, possible, rows, known, schedules, precision)
    search = BestFirst(estimates, budget if microbatches is None else None)
    sampled = None if whole else layers_to_sample(model, given_patterns(layouts))
    estimator = GraphEstimator(model, batch, known, budget, layouts, batch_dims, precision, schedules, sampled)
    with imagined_world(ranks):
        search.run(estimator.estimates, most, seconds, say or _silent)
    return _ranking(known, search.estimates, too_large | search.left_out, budget)


def analytic_estimates(
    model: nn.Module,
    possible: Sequence[Configuration],
    rows: int,
    cluster: Cluster,
    schedules: Sequence[str],
    precision: Precision | None,
) -> dict[Configuration, AnalyticEstimate]:
    """The analytic estimates of configurations for a batch with so many rows of activations."""
    matrices, layers = matrices_of(model), find_layers(model)
    if precision is not None:
        matrices = [replace(each, dtype=precision.compute) for each in matrices]
    count = None if layers is None else layers.count
    splits = any(name in SPLITTING for name in schedules)
    return {
        each: analytic_estimate(matrices, rows, each, cluster, splits_backward=splits, num_layers=count)
        for each in possible
    }


def _candidates(
    ranks: int, size: int | None, microbatches: Sequence[int] | None, axes: Sequence[str]
) -> list[Configuration]:
    if unknown := set(axes) - set(AXES):
        raise PlanningError(
            f"no axis of a mesh is called {', '.join(sorted(unknown))}", f"take some of {', '.join(AXES)}"
        )
    found = list(candidates(ranks, size, microbatches, axes))
    if not found:
        raise PlanningError(f"no mesh of {ranks} ranks divides a batch of {size}", "change the batch or the ranks")
    return found


def _silent(_: str) -> None:
    pass


def batch_size_and_rows(
    batch: Sequence[Any] | Mapping[str, Any], batch_dims: Mapping[str | int, int | None]
) -> tuple[int | None, int]:
    """The size of the split dim of the first tensor that is split, and its number of rows of activations."""
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    for leaf, dim in zip(leaves, split_dim(args, kwargs, batch_dims), strict=True):
        if dim is not None:
            return leaf.shape[dim], rows_of(leaf)
    return None, 1


def _too_large(
    everything: Sequence[Configuration], matrices: Sequence[Matrix], budget: float
) -> dict[Configuration, str]:
    """The configurations whose weights alone do not fit, each with the reason.

    Raises:
        PlanningError: the weights fit in no configuration.
    """
    needs = {each: analytic_bytes(matrices, each) for each in everything}
    found = {each: f"its weights alone take {_gib(need)}" for each, need in needs.items() if need > budget}
    if len(found) == len(everything):
        raise _nothing_fits(needs, budget)
    return found


def _ranking(
    cluster: Cluster, found: Mapping[Configuration, list[Estimate]], left_out: dict[Configuration, str], budget: float
) -> Ranking:
    fitting = {}
    for configuration, estimates in found.items():
        fits = [estimate for estimate in estimates if estimate.peak_bytes <= budget]
        if fits:
            fitting[configuration] = min(fits, key=lambda estimate: estimate.step_us)
        else:
            left_out[configuration] = f"it takes {_gib(min(each.peak_bytes for each in estimates))} of memory"
    if not fitting:
        if not found:
            raise PlanningError(f"no configuration can be made: {next(iter(left_out.values()))}", "see above")
        raise _nothing_fits({c: min(e.peak_bytes for e in each) for c, each in found.items()}, budget)
    ordered = sorted(fitting.items(), key=lambda item: item[1].step_us)
    best = ordered[0][1]
    ranked = [Ranked(configuration, each, drawback(each, best)) for configuration, each in ordered]
    return Ranking(cluster, ranked, left_out)


def drawback(estimate: Estimate, best: Estimate) -> str:
    """What makes a step slower than the best: the part of its time with the largest difference."""
    if estimate is best:
        return ""
    worst = most_grown(estimate.parts.parts, best.parts.parts)
    return f"{worst.label}: {worst.time_us / 1e3:+,.2f} ms"


def _nothing_fits(needs: Mapping[Configuration, float], budget: float) -> PlanningError:
    least = min(needs, key=needs.__getitem__)
    return PlanningError(
        f"nothing fits into {_gib(budget)} of a rank's memory: the least is {_gib(needs[least])}, by {least}",
        "take more ranks, more or smaller microbatches, or a smaller model",
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.3f} GiB"
