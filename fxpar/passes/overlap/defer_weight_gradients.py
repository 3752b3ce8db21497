"""Defer computations until a collective has started, so that they run concurrently with it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate

from torch import fx

from fxpar.graph.collective_sites import Site, is_matmul
from fxpar.graph.min_cut import closure, operands
from fxpar.ir.op_predicates import has_effect, is_random

MOST_DEFERRED = 4
"""How many matmuls may be deferred for one collective: those of an attention with separate q, k and v. A deferred
matmul keeps its operands in memory."""


def defer_weight_gradients(
    graph: fx.Graph, ops: Sequence[fx.Node], sites: Iterable[Site], waits: Mapping[fx.Node, Sequence[Site]]
) -> list[fx.Node]:
    """The `ops` of `graph`, reordered so that operands of collectives are computed before what collectives do not need.

    Before each of the `sites`, ops that no site needs are deferred until it has started: the last `MOST_DEFERRED` such
    matmuls, and the ops between these. They run before the first op that needs the site's result. In a backward, the
    weight gradients of a layer then overlap the all-reduce of its input gradient. All other ops keep their order.
    Matmuls are counted, not timed, since all ranks must decide the same, and sizes may differ between them.
    Source: Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training", on overlap with the weights' gradients.

    Args:
        graph: the ops' graph.
        ops: the ops that compute, in an order in which they can run.
        sites: the collectives that are to overlap computation.
        waits: the sites that each op must wait for, unless an earlier op did.

    Before: dw = mm(x_t, dy); dx = mm(dy, w_t); start(dx); [wait]; dx_1 = mul(wait, mask)
    After:  dx = mm(dy, w_t); start(dx); dw = mm(x_t, dy); [wait]; dx_1 = mul(wait, mask)
    """
    beside = set(sites)
    urgent = closure((site.start for site in beside), operands)
    near = _in_front_of_a_start(graph, ops, beside, urgent)
    ordered: list[fx.Node] = []
    deferred: list[fx.Node] = []
    waited = set[Site]()
    for op in ops:
        if op in near and op not in urgent and not _draws_or_changes(op):
            deferred.append(op)
            continue
        blocking = [site for site in waits[op] if site in beside and site not in waited]
        if blocking:
            ordered += deferred
            deferred = []
            waited.update(blocking)
        ordered.append(op)
    return ordered + deferred


def _in_front_of_a_start(
    graph: fx.Graph, ops: Sequence[fx.Node], sites: AbstractSet[Site], urgent: AbstractSet[fx.Node]
) -> set[fx.Node]:
    """The ops with at most `MOST_DEFERRED` deferrable matmuls between them and the next start."""
    places = {op: index for index, op in enumerate(ops)}
    latest: dict[fx.Node, int] = {}  # the last of the ops that a node needs
    for node in graph.nodes:
        latest[node] = max([places.get(node, -1), *(latest[operand] for operand in node.all_input_nodes)])
    starts = sorted(latest[site.start] for site in sites)
    passed = [0, *accumulate(is_matmul(op) and op not in urgent for op in ops)]
    near: set[fx.Node] = set()
    for index, op in enumerate(ops):
        following = bisect_left(starts, index)
        if following < len(starts) and passed[starts[following]] - passed[index] <= MOST_DEFERRED:
            near.add(op)
    return near


def _draws_or_changes(op: fx.Node) -> bool:
    """Whether `op` must keep its place among others like it: it draws random numbers, or has an effect."""
    return has_effect(op) or is_random(op.target)
