"""A first look at many meshes: AxoNN's model on a list of matrices, without making a single graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import sympy
import torch
from torch import Tensor, nn

from fxpar.mesh import Mesh
from fxpar.planner import equations as eq
from fxpar.planner.cluster import Cluster
from fxpar.planner.configuration import Configuration
from fxpar.planner.placement import bytes_per_us, consecutive_hosts, spread

_FLOPS_PER_WEIGHT = 6
"""For each row of activations: a product and a sum forward, and twice that backward."""

_COPIES = 4
"""Of each weight: itself, its gradient, and the two moments of Adam."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights of k x n."""

    k: int
    n: int
    dtype: torch.dtype


def matrices_of(model: nn.Module) -> list[Matrix]:
    """The parameters of a model that multiply its activations, in the order in which they were registered."""
    found = (parameter for parameter in model.parameters() if parameter.dim() > 1)
    return [Matrix(math.prod(p.shape[1:]), p.shape[0], p.dtype) for p in found]


def rows_of(leaf: Tensor) -> int:
    """How many rows of activations a batch is: its tokens, or all but the last dim of features."""
    return leaf.numel() if not leaf.is_floating_point() else math.prod(leaf.shape[:-1])


_ORDER = [eq.m, eq.k, eq.n, eq.width, *eq.size.values(), *eq.bandwidth.values()]
_LAYER_TIME = [sympy.lambdify(_ORDER, eq.layer_time(transposed=transposed), "math") for transposed in (False, True)]


def coarse_us(matrices: Sequence[Matrix], rows: int, configuration: Configuration, cluster: Cluster) -> float:
    """The time of a step: arithmetic, and Eq. 9 for the matrices of one stage, every second one transposed.

    Neither overlaps; the pipeline's bubble is that of 1F1B.
    """
    sizes = configuration.mesh
    along = [sizes[axis] for axis in eq.AXES]
    rates = _rates((sizes["pipe"], sizes["data"], sizes["z"], sizes["y"], sizes["x"]), cluster)
    flops_us = sum(_FLOPS_PER_WEIGHT * each.k * each.n * rows / cluster.flops_per_us(each.dtype) for each in matrices)
    # Most layers of a model are alike.
    layers = Counter((each, number % 2) for number, each in enumerate(matrices))
    sent_us = sum(
        count * _LAYER_TIME[transposed](rows / sizes["data"], each.k, each.n, each.dtype.itemsize, *along, *rates)
        for (each, transposed), count in layers.items()
    )
    bubble = 1 + (sizes["pipe"] - 1) / configuration.microbatches
    return float((flops_us / math.prod(sizes.values()) + sent_us / sizes["pipe"]) * bubble)


@cache
def _rates(sizes: tuple[int, int, int, int, int], cluster: Cluster) -> list[float]:
    """What a rank sends along each of the model's axes."""
    hosts = consecutive_hosts(math.prod(sizes), cluster.ranks_per_host)
    mesh = Mesh(*sizes, hosts=hosts)
    return [bytes_per_us(cluster, spread(mesh, axis)) for axis in eq.AXES]


def coarse_bytes(matrices: Sequence[Matrix], configuration: Configuration) -> float:
    """What a rank needs at least: its part of all weights, gradients and states of the optimizer."""
    sizes = configuration.mesh
    parts = math.prod(size for axis, size in sizes.items() if axis != "data")
    return _COPIES * sum(each.k * each.n * each.dtype.itemsize for each in matrices) / parts
