"""A minimum cut of a graph that runs in two parts: the values that cross from one to the other in the fewest bytes."""

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

    Every value v is an edge from (v, "made") to (v, "kept") whose capacity is the memory that keeping v takes. Nodes on
    the early side of the cut run in the early part.

    Args:
        undecided: the nodes that may run early, with all that they depend on, in the graph's order.
        early: those that run early in any case; if they may run twice, perhaps late as well.
        leaving: those of `undecided` that the late part needs in any case.
        free: those that take no memory, since they are in memory anyway.
        again: those that may run in both parts, in addition to those that are free to recompute.
        dropped: those of `again` that must not cross.
    """

    def repeats(node: fx.Node) -> bool:
        return node in again or is_free_to_recompute(node)

    network: nx.DiGraph[Any] = nx.DiGraph()
    network.add_nodes_from(("early", "late"))
    for node in undecided:
        # Among equal cuts, prefer the one that saves a value rather than a view of it.
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
    """Whether the result of `node` can be saved: it is one tensor, and not one that a collective is still writing."""
    return isinstance(value(node), Tensor) and communication(node) is None


def kept_bytes(node: fx.Node) -> int:
    """The memory that `node` takes while it is kept, in bytes. A dense part of a larger storage is kept as a copy."""
    kept = tensor(node)
    return kept.nbytes if is_dense(kept) else kept.untyped_storage().nbytes()


def operands(node: fx.Node) -> Iterable[fx.Node]:
    """The operands of `node`."""
    return node.all_input_nodes


def users(node: fx.Node) -> Iterable[fx.Node]:
    """The users of `node`."""
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
