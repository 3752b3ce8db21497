"""Which node made the memory that a value lies in, and how much values take together."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from fxpar._torch import c10d_functional
from fxpar.graph.min_cut import kept_bytes

aten = torch.ops.aten


def owner_of(node: fx.Node) -> fx.Node:
    """The node that made the memory in which the value of `node` lies."""
    while (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """What `node` shares its memory with, one step nearer to its origin."""
    if node.target is operator.getitem:
        return _viewed(node.all_input_nodes[0])
    in_place = (aten._unsafe_view.default, c10d_functional.wait_tensor.default)
    is_view = isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in in_place)
    return node.all_input_nodes[0] if is_view else None


def held_bytes(nodes: Iterable[fx.Node]) -> int:
    """What the values of `nodes` take in memory together: all that they are views of, once."""
    return owned_bytes({owner_of(node) for node in nodes})


def owned_bytes(owners: Iterable[fx.Node]) -> int:
    """What distinct `owners` take in memory."""
    return sum(map(kept_bytes, owners))
