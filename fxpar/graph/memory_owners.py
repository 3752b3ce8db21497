"""Which node allocates the storage of a value, and how many bytes storages take together."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar.graph.min_cut import kept_bytes
from fxpar.ir.op_predicates import is_view


def owner_of(node: fx.Node) -> fx.Node:
    """The node that allocates the storage of the value of `node`."""
    while (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that `node` shares its storage with, one step back; None if it allocates its own."""
    if node.target is operator.getitem:
        return _viewed(node.all_input_nodes[0])
    shares = is_view(node.target) or node.target is c10d_functional.wait_tensor.default
    return node.all_input_nodes[0] if shares else None


def held_bytes(nodes: Iterable[fx.Node]) -> int:
    """The bytes that the values of `nodes` hold together: every storage that they view, once."""
    return owned_bytes({owner_of(node) for node in nodes})


def owned_bytes(owners: Iterable[fx.Node]) -> int:
    """The bytes of the values of distinct `owners`."""
    return sum(map(kept_bytes, owners))
