"""The analytic estimate of a step: AxoNN's performance model for a list of matrices, without any graphs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import sympy
import torch
from torch import Tensor, nn

from fxpar.costs import equations as eq
from fxpar.costs.placement import Spread, bytes_per_us, consecutive_hosts, latency_us, spread
from fxpar.hardware.cluster import Cluster
from fxpar.planner.configuration import Configuration
from fxpar.world.mesh import Mesh

_FLOPS_PER_WEIGHT = 6
"""For each row of activations: a multiplication and an addition in the forward, and twice that in the backward."""

_PRODUCTS = 3
"""Products of a layer: outputs, and gradients of inputs and of weights. Each uses all weights and activations once."""

_COPIES = 4
"""Copies of each weight: itself, its gradient, and the two moments of Adam."""

_ACTIVATION_AXES, _WEIGHT_AXES = ("x", "y"), ("z", "data")
"""Collectives of activations run for every microbatch, those of weights and gradients once per step."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights of k x n."""

    k: int
    n: int
    dtype: torch.dtype


def matrices_of(model: nn.Module) -> list[Matrix]:
    """The parameters of a model that multiply its activations, in the order of registration."""
    found = (parameter for parameter in model.parameters() if parameter.dim() > 1)
    return [Matrix(math.prod(p.shape[1:]), p.shape[0], p.dtype) for p in found]


def rows_of(leaf: Tensor) -> int:
    """The number of rows of activations: the tokens or, for features, the product of all dims but the last."""
    return leaf.numel() if not leaf.is_floating_point() else math.prod(leaf.shape[:-1])


@dataclass(frozen=True, slots=True)
class AnalyticEstimate:
    """The time of a step on one configuration, given the time of all operations except matrix products.

    num_ranks, stages, microbatches: of the configuration.
    matmul_us, collectives_us: matrix products, and collectives over x and y, of one microbatch on one stage.
    message_us: sending one microbatch from one stage to the next.
    once_us: collectives over z and data of one stage, once per step.
    splits_backward: whether a schedule may compute weight gradients while it waits.
    uneven: the largest number of layers on a stage, divided by the average.
    """

    num_ranks: int
    stages: int
    microbatches: int
    matmul_us: float
    collectives_us: float
    message_us: float
    once_us: float
    splits_backward: bool
    uneven: float

    def step_us(self, other_us: float) -> float:
        """The time of a step in which all stages take as long as the largest one.

        Collectives overlap with nothing, messages as in eager-1F1B. The first microbatch passes all stages forward and
        back. Then each takes a period: the time of a stage or, if longer, that of the first microbatch divided by the
        microbatches that eager-1F1B has in flight, 2 S - 1 on the first stage. Weight gradients, a third of the
        computation, can fill the time in which the last gradients come back.

        Args:
            other_us: the time that one rank would need for all other operations of the step, which ranks share evenly.
        """
        hops, following = self.stages - 1, self.microbatches - 1
        compute_us = self.matmul_us + self.uneven * other_us / (self.num_ranks * self.microbatches)
        stage_us = compute_us + self.collectives_us
        through_us = stage_us + hops * (stage_us + 2 * self.message_us)
        period_us = max(stage_us, through_us / (2 * self.stages - 1))
        filled_us = 0.0
        if self.splits_backward:
            weights_us = compute_us / 3
            back_us = (stage_us - weights_us) / 2 + self.message_us
            filled_us = hops * weights_us + min(following * weights_us, hops * back_us)
        return through_us + following * period_us - filled_us + self.once_us

    def other_us(self, step_compute_us: float) -> float:
        """The argument of `step_us` with which the busiest rank computes for `step_compute_us` in a step."""
        return max(0.0, step_compute_us - self.microbatches * self.matmul_us) * self.num_ranks / self.uneven


def analytic_estimate(
    matrices: Sequence[Matrix],
    rows: int,
    configuration: Configuration,
    cluster: Cluster,
    *,
    splits_backward: bool = False,
    num_layers: int | None = None,
) -> AnalyticEstimate:
    """Eq. 9 for the matrices of one stage, every second one transposed, plus the latencies of what it sends.

    `num_layers`: the number of equal layers, of which a stage has a whole number; None if stages can start anywhere.
    """
    sizes, microbatches = configuration.mesh, configuration.microbatches
    along = [sizes[axis] for axis in eq.AXES]
    spreads = _spreads((sizes["pipe"], sizes["data"], sizes["z"], sizes["y"], sizes["x"]), cluster.ranks_per_host)
    rates = [bytes_per_us(cluster, spreads[axis]) for axis in eq.AXES]
    # Most layers of a model are equal, so each kind is computed once.
    layers = Counter((each, number % 2) for number, each in enumerate(matrices))
    uneven = _uneven(num_layers, sizes["pipe"])
    share = uneven / sizes["pipe"]

    def sent_us(times: Sequence[_Function]) -> float:
        found = (
            count * times[transposed](rows / sizes["data"], each.k, each.n, each.dtype.itemsize, *along, *rates)
            for (each, transposed), count in layers.items()
        )
        return sum(found) * share

    # Each layer reduces outputs along one of x and y and input gradients along the other. Weights are in buckets.
    latencies_us = sum(latency_us(cluster, spreads[axis]) for axis in _ACTIVATION_AXES) * len(matrices) * share
    own_rows = rows / (sizes["data"] * sizes["z"] * microbatches)
    return AnalyticEstimate(
        math.prod(sizes.values()),
        sizes["pipe"],
        microbatches,
        sum(count * _matmul_us(each, own_rows, sizes, cluster) for (each, _), count in layers.items()) * share,
        sent_us(_ACTIVATION_TIMES) / microbatches + latencies_us,
        _message_us(matrices, rows, configuration, spreads["pipe"], cluster),
        sent_us(_WEIGHT_TIMES) + sum(latency_us(cluster, spreads[axis]) for axis in _WEIGHT_AXES),
        splits_backward,
        uneven,
    )


def _uneven(num_layers: int | None, stages: int) -> float:
    return 1.0 if num_layers is None else math.ceil(num_layers / stages) * stages / num_layers


def _matmul_us(matrix: Matrix, rows: float, sizes: Mapping[str, int], cluster: Cluster) -> float:
    """A rank's three products of a layer, forward and backward: arithmetic or memory, whichever takes longer."""
    parts = sizes["x"] * sizes["y"]
    arithmetic_us = _FLOPS_PER_WEIGHT * matrix.k * matrix.n / parts * rows / cluster.flops_per_us(matrix.dtype)
    # The dim that x shards alternates between layers, so activations are assumed to be divided evenly over x and y.
    elements = matrix.k * matrix.n / parts + rows * (matrix.k + matrix.n) / math.sqrt(parts)
    return max(arithmetic_us, _PRODUCTS * elements * matrix.dtype.itemsize / cluster.memory_bytes_per_us)


_Function: TypeAlias = Callable[..., float]

_ORDER = [eq.m, eq.k, eq.n, eq.width, *eq.size.values(), *eq.bandwidth.values()]


def _times_over(axes: Sequence[str]) -> list[_Function]:
    """The terms of Eq. 9 over these axes, for a plain layer and for a transposed one."""
    terms = [eq.layer_times(transposed=transposed) for transposed in (False, True)]
    sums = (sympy.Add(*(time for (_, axis), time in each.items() if axis in axes)) for each in terms)
    return [sympy.lambdify(_ORDER, time, "math") for time in sums]


_ACTIVATION_TIMES, _WEIGHT_TIMES = _times_over(_ACTIVATION_AXES), _times_over(_WEIGHT_AXES)


@cache
def _spreads(sizes: tuple[int, int, int, int, int], ranks_per_host: int) -> Mapping[str, Spread]:
    mesh = Mesh(*sizes, hosts=consecutive_hosts(math.prod(sizes), ranks_per_host))
    return {axis: spread(mesh, axis) for axis in mesh.sizes}


def _message_us(
    matrices: Sequence[Matrix], rows: int, configuration: Configuration, spread_over: Spread, cluster: Cluster
) -> float:
    """The time to send one microbatch to the next stage: its rows at the narrowest width of the model's matrices.

    Stages are split where little is sent. The hosts of a stage share the message, each through one interface.
    """
    if spread_over.size == 1 or not matrices:
        return 0.0
    num_bytes = rows / configuration.microbatches * min(min(each.k, each.n) * each.dtype.itemsize for each in matrices)
    ranks = math.prod(configuration.mesh.values()) // spread_over.size
    if not spread_over.rings_per_host:
        return cluster.inside.chunk_us + cluster.inside.time_us(num_bytes / ranks)
    hosts = math.ceil(ranks / cluster.ranks_per_host)
    return cluster.network.chunk_us + cluster.network.time_us(num_bytes / hosts)


def analytic_bytes(matrices: Sequence[Matrix], configuration: Configuration) -> float:
    """The least memory that a rank needs: its shards of all weights, gradients and optimizer states."""
    sizes = configuration.mesh
    parts = math.prod(size for axis, size in sizes.items() if axis != "data")
    return _COPIES * sum(each.k * each.n * each.dtype.itemsize for each in matrices) / parts
