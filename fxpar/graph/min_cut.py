"""Where a graph that runs in two parts is best cut: what may run twice, and which values cross for the least memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from fxpar.ir.node_meta import communication, tensor, value
from fxpar.ir.op_predicates import is_free_to_recompute
from fxpar.ir.strides import is_dense

aten = torch.ops.aten


def min_cut_values(
    undecided: Sequence[fx.Node],
    early: AbstractSet[fx.Node],
    leaving: AbstractSet[fx.Node],
    free: AbstractSet[fx.Node],
    again: AbstractSet[fx.Node] = frozenset(),
    dropped: AbstractSet[fx.Node] = frozenset(),
) -> list[fx.Node]:
    """The values that the early part passes to the late part: a minimum cut between what must run in each.

    Every value v is an edge from (v, "made") to (v, "kept") whose capacity is the memory that keeping v takes. What
    lies on the early side of the cut is made early.

    Args:
        undecided: the nodes that may be made early, with all that they are made of, in the graph's order.
        early: those that are made early in any case; if they may run twice, perhaps late as well.
        leaving: those of `undecided` that the late part needs in any case.
        free: those that take no memory, since they are there anyhow.
        again: those that may run in both parts, besides what costs nothing.
        dropped: those of `again` that may not be passed on.
    """

    def repeats(node: fx.Node) -> bool:
        return node in again or is_free_to_recompute(node)

    network: nx.DiGraph[Any] = nx.DiGraph()
    network.add_nodes_from(("early", "late"))
    for node in undecided:
        # Of equal cuts, take the one that saves a value rather than a view of it.
        capacity = math.inf if node in dropped else _capacity(node, free) * len(undecided) + repeats(node)
        network.add_edge((node, "made"), (node, "kept"), capacity=capacity)
        if node in early and not repeats(node):
            network.add_edge("early", (node, "made"))
        if node in leaving:
            network.add_edge((node, "kept"), "late")
        for operand in node.all_input_nodes:
            network.add_edge((operand, "kept"), (node, "made"))
            if not repeats(operand):
                network.add_edge((node, "made"), (operand, "made"))
    _, (in_early, _) = nx.minimum_cut(network, "early", "late")
    return [node for node in undecided if (node, "made") in in_early and (node, "kept") not in in_early]


def _capacity(node: fx.Node, free: AbstractSet[fx.Node]) -> float:
    """The memory that keeping `node` takes, in bytes."""
    if not can_be_kept(node):
        return math.inf
    return 0 if node in free else kept_bytes(node)


def can_be_kept(node: fx.Node) -> bool:
    """Whether `node` returns something to keep: a tuple is nothing, nor is what a collective has not written yet."""
    return isinstance(value(node), Tensor) and communication(node) is None


def kept_bytes(node: fx.Node) -> int:
    """The memory that `node` takes while it is kept, in bytes. A dense part of something larger is kept as a copy."""
    kept = tensor(node)
    return kept.nbytes if is_dense(kept) else kept.untyped_storage().nbytes()


def operands(node: fx.Node) -> Iterable[fx.Node]:
    """What `node` takes."""
    return node.all_input_nodes


def users(node: fx.Node) -> Iterable[fx.Node]:
    """What takes `node`."""
    return node.users


def closure(start: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes of `start` and all that follow from them."""
    found, pending = set[fx.Node](), list(start)
    while pending:
        node = pending.pop()
        if node not in found and node.op != "output":
            found.add(node)
            pending.extend(following(node))
    return found
