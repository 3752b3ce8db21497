"""Start all-gathers one layer before they are needed, as far as memory allows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import fx

from fxpar.graph.collective_sites import Site, is_matmul

FARTHEST = 4
"""How many matmuls may run between the start of a gather and its first use, where few layers gather anything."""


def gather_ahead(
    ops: Sequence[fx.Node], waits: Mapping[fx.Node, Sequence[Site]], budget_bytes: float
) -> dict[fx.Node, list[Site]]:
    """By op, the sites of the rule "all_gathers" that start right before it.

    A layer is a matmul with the sites that it and the ops since the last layer are the first to need. When the first op
    of a layer runs, the sites of the next layer start, in the order in which they are needed, as long as started and
    unused results have at most `budget_bytes` and are needed after at most `FARTHEST` matmuls. The others start once
    that holds, at the latest where they are needed. The sites of the first layer may start with the first op.
    Source: Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training", on overlap of the weights' all-gathers.

    Args:
        ops: the ops that compute, in the order in which they will run.
        waits: the sites that each op must wait for, unless an earlier op did.
        budget_bytes: the most that started and unused results may take together.
    """
    first_uses = _first_uses(ops, waits)
    queue = [site for sites in first_uses.values() for site in sites]
    ends = _ends_of_layers(first_uses)
    bytes_before = [0, *accumulate(site.num_bytes for site in queue)]
    passed = [0, *accumulate(map(is_matmul, ops))]
    matmuls_before = [passed[index] for index, op in enumerate(ops) for _ in first_uses.get(op, ())]
    starts: dict[fx.Node, list[Site]] = {}
    started = used = 0
    allowed = ends[0] if ends else 0
    for index, op in enumerate(ops):
        used += len(first_uses.get(op, ()))
        due = max(started, used)
        if op in first_uses:
            allowed = ends[min(bisect_left(ends, used) + 1, len(ends) - 1)]
        while (
            due < allowed
            and bytes_before[due + 1] - bytes_before[used] <= budget_bytes
            and matmuls_before[due] - passed[index] <= FARTHEST
        ):
            due += 1
        if due > started:
            starts[op] = queue[started:due]
            started = due
    return starts


def _first_uses(ops: Sequence[fx.Node], waits: Mapping[fx.Node, Sequence[Site]]) -> dict[fx.Node, list[Site]]:
    """The sites that each op is the first to wait for; only ops that are the first for some."""
    seen = set[Site]()
    first_uses: dict[fx.Node, list[Site]] = {}
    for op in ops:
        new = [site for site in waits[op] if site.rule == "all_gathers" and site not in seen]
        if new:
            first_uses[op] = new
            seen.update(new)
    return first_uses


def _ends_of_layers(first_uses: Mapping[fx.Node, Sequence[Site]]) -> list[int]:
    """How many sites are needed up to the end of each layer; ops after the last matmul are a layer, too."""
    ends: list[int] = []
    passed = 0
    for op, sites in first_uses.items():
        passed += len(sites)
        if is_matmul(op):
            ends.append(passed)
    return ends if passed == sum(ends[-1:]) else [*ends, passed]
