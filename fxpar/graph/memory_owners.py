"""Which node made the memory that a value lies in, and how much values take together."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from fxpar._torch import c10d_functional
from fxpar.graph.min_cut import kept_bytes
from fxpar.ir.op_predicates import is_view


def owner_of(node: fx.Node) -> fx.Node:
    """The node that made the memory in which the value of `node` lies."""
    while (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """What `node` shares its memory with, one step nearer to its origin."""
    if node.target is operator.getitem:
        return _viewed(node.all_input_nodes[0])
    shares = is_view(node.target) or node.target is c10d_functional.wait_tensor.default
    return node.all_input_nodes[0] if shares else None


def held_bytes(nodes: Iterable[fx.Node]) -> int:
    """What the values of `nodes` take in memory together: all that they are views of, once."""
    return owned_bytes({owner_of(node) for node in nodes})


def owned_bytes(owners: Iterable[fx.Node]) -> int:
    """What distinct `owners` take in memory."""
    return sum(map(kept_bytes, owners))
