"""The performance model of AxoNN (Singh et al.), Eqs. 1-10, as expressions to print and to evaluate.

A layer multiplies activations of m x k by weights of k x n, on a mesh of G_x, G_y, G_z and G_data ranks: m is sharded
over z, k over y, n over x, and the storage of the weights over z as well. m is that of one data group. Every second
layer is transposed: x and y change places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import sympy
from sympy import Expr

from fxpar.ir.node_meta import CollectiveKind

AXES = ("x", "y", "z", "data")
"""The axes of the model, from the one with consecutive ranks outwards."""

Term: TypeAlias = tuple[CollectiveKind, str]
"""A collective of a layer: its kind and its axis."""

m, k, n = sympy.symbols("m k n", positive=True)
width = sympy.Symbol("w", positive=True)
"""Bytes of an element."""
num_bytes = sympy.Symbol("b", positive=True)
"""The larger of a rank's input and output of a collective."""
ranks = sympy.Symbol("G", positive=True)
"""How many ranks take part in a collective."""
beta = sympy.Symbol("beta", positive=True)
"""Bytes that a rank sends in a microsecond."""
beta_intra, beta_inter = sympy.symbols("beta_intra beta_inter", positive=True)
"""`beta` of each rank within a host, and that of all ranks of a host together to other hosts."""
ranks_per_host = sympy.Symbol("G_node", positive=True)
size: Mapping[str, sympy.Symbol] = {axis: sympy.Symbol(f"G_{axis}", positive=True) for axis in AXES}
bandwidth: Mapping[str, sympy.Symbol] = {axis: sympy.Symbol(f"beta_{axis}", positive=True) for axis in AXES}


def elements_sent(kind: CollectiveKind, buffer: Any, parts: Any) -> Any:
    """What each of `parts` ranks sends in a ring, in the unit of `buffer`, the larger of its input and output.

    In Eq. 1 the buffer is the input of an all-gather; here it is the output, G times as large. Eqs. 2 and 3 are
    unchanged. An all-to-all sends as much as a reduce-scatter.
    """
    share = (parts - 1) / parts
    return 2 * share * buffer if kind == "all_reduce" else share * buffer


def ring_time(kind: CollectiveKind) -> Expr:
    """Eqs. 1-3: the time of a collective of G ranks on a buffer of b bytes."""
    return elements_sent(kind, num_bytes, ranks) / beta


def ring_time_us(kind: CollectiveKind, buffer_bytes: float, num_ranks: int, bytes_per_us: float) -> float:
    """`ring_time` in numbers. Every rank asks for it: arithmetic and printing of symbols import half of sympy."""
    return float(elements_sent(kind, buffer_bytes, num_ranks) / bytes_per_us)


def layer_elements(*, transposed: bool = False) -> dict[Term, Expr]:
    """The terms of Eqs. 4-8 for one layer, without width and bandwidth: elements that each rank sends."""
    x, y = ("y", "x") if transposed else ("x", "y")
    gx, gy, gz, gdata = (size[axis] for axis in (x, y, "z", "data"))
    weights, inputs, outputs = k * n / (gx * gy), m * k / (gz * gy), m * n / (gz * gx)
    return {
        ("all_gather", "z"): elements_sent("all_gather", weights, gz),
        ("reduce_scatter", "z"): elements_sent("reduce_scatter", weights, gz),
        ("all_reduce", y): elements_sent("all_reduce", outputs, gy),
        ("all_reduce", x): elements_sent("all_reduce", inputs, gx),
        ("all_reduce", "data"): elements_sent("all_reduce", weights / gz, gdata),
    }


def layer_times(*, transposed: bool = False) -> dict[Term, Expr]:
    """Eqs. 4-8: the time of each collective of one layer."""
    return {
        (kind, axis): width * elements / bandwidth[axis]
        for (kind, axis), elements in layer_elements(transposed=transposed).items()
    }


def layer_time(*, transposed: bool = False) -> Expr:
    """Eq. 9: all communication of one layer, one collective after another."""
    return sympy.Add(*layer_times(transposed=transposed).values())


def axis_bandwidth(axis: str) -> Expr:
    """Eq. 10: the bandwidth of a rank along `axis`, where hosts have G_node consecutive ranks each.

    If groups along the axis are within hosts, it is that of the links inside a host. Otherwise all rings that leave a
    host share what the host sends. The equation is for sizes that divide G_node or are multiples of it:
    `fxpar.costs.placement` counts the rings of any mesh on any hosts.
    """
    inside = sympy.Mul(*(size[inner] for inner in AXES[: AXES.index(axis)]))
    shared = beta_inter / sympy.Min(ranks_per_host, inside)
    return sympy.Piecewise((beta_intra, inside * size[axis] <= ranks_per_host), (shared, True))


def agnostic_bandwidth(axis: str) -> Expr:
    """The bandwidth of `axis` in a model that knows no hosts: every rank may have to send to another host."""
    assert axis in AXES, f"{axis} is not of the model"
    return beta_inter


sequences, length, layers, hidden, vocabulary = sympy.symbols("B s l h V", positive=True)
"""Sizes of a GPT and its batch: B sequences of s tokens, l layers of hidden size h, and a vocabulary of V."""


def transformer_flops() -> Expr:
    """Floating-point operations of one training step of a GPT whose activations are all recomputed.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, section 5.1.
    """
    beyond_weights = length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96 * sequences * length * layers * hidden**2 * (1 + beyond_weights)


def configurations(num_ranks: int, axes: tuple[str, ...] = AXES) -> Iterator[dict[str, int]]:
    """Every way to arrange `num_ranks` ranks along `axes`: axis -> size, whose product is `num_ranks`."""
    if not axes[1:]:
        yield {axes[0]: num_ranks}
        return
    for first in range(1, num_ranks + 1):
        if num_ranks % first == 0:
            for rest in configurations(num_ranks // first, axes[1:]):
                yield {axes[0]: first, **rest}
