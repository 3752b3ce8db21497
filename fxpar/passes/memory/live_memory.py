"""The peak memory of a graph's values while it runs, for either lowering."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

from torch import Tensor, fx

from fxpar.graph.memory_owners import owner_of
from fxpar.graph.min_cut import kept_bytes
from fxpar.graph.view_users import wait_of
from fxpar.ir.node_meta import communication, value
from fxpar.ir.op_predicates import is_view
from fxpar.passes.memory.fused_values import fused_away, is_elementwise


def peak_live_bytes(graph: fx.Graph, order: Iterable[fx.Node] | None = None, *, fuses: bool = False) -> int:
    """The peak, in bytes, of the values that a graph computes; each is live from where it is computed to its last use.

    A collective reads its operand until it is waited for. Inputs, which the caller holds, do not count, nor does memory
    inside an op, such as a copy of an operand whose strides its kernel does not support.

    Args:
        order: the nodes in the order in which they will run; default: the graph's order.
        fuses: whether Inductor compiles the graph: elementwise values that only feed other ops are never in memory, and
            an elementwise op may overwrite its operand. Otherwise every value is in memory.
    """
    nodes = list(graph.nodes if order is None else order)
    index = {node: position for position, node in enumerate(nodes)}
    away = fused_away(graph) if fuses else frozenset()
    last_use = _last_uses(nodes, index, away)
    changes = [0] * (len(nodes) + 1)
    overwriting = set[fx.Node]()
    for owner, last in last_use.items():
        overwritten = fuses and nodes[last] not in overwriting and _can_overwrite(nodes[last], owner)
        if overwritten:
            overwriting.add(nodes[last])
        changes[index[_maker(owner)]] += kept_bytes(owner)
        changes[last if overwritten else last + 1] -= kept_bytes(owner)
    for node in nodes:
        unused = sum(part.nbytes for part in _unused_parts(node))
        changes[index[node]] += unused
        changes[index[node] + 1] -= unused
    return _highest(changes)


def _last_uses(nodes: list[fx.Node], index: dict[fx.Node, int], away: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """By the node that owns memory: the position of the last node that reads it.

    A value that is fused away is computed in its users, and its operands are read there.
    """
    reads_at: dict[fx.Node, int] = {}
    last_use: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        owner = owner_of(node)
        at = reads_at.get(node, index[node]) if node in away else index[node]
        for operand in node.all_input_nodes:
            reads_at[operand] = max(reads_at.get(operand, 0), at)
            # A read of a view, even of one that is fused away, reads the memory of its owner.
            source = owner_of(operand)
            reads_at[source] = max(reads_at.get(source, 0), at)
        if owner is node and node.op == "call_function" and isinstance(value(node), Tensor) and node not in away:
            last_use[node] = reads_at.get(node, index[node])
    for node in last_use:
        if communication(node) is not None:
            given = owner_of(node.all_input_nodes[0])
            if given in last_use:
                wait = wait_of(node)
                last_use[given] = max(last_use[given], last_use[node] if wait is None else index[wait])
    return last_use


def _maker(owner: fx.Node) -> fx.Node:
    """The node that allocates a value: for an item of a tuple, the op that returns the tuple."""
    while owner.target is operator.getitem:
        owner = owner.all_input_nodes[0]
    return owner


def _unused_parts(node: fx.Node) -> Iterator[Tensor]:
    """The tensors in a returned tuple that no node uses: they are freed right after the op."""
    if node.op != "call_function" or node.target is operator.getitem:
        return
    if isinstance(made := value(node), tuple | list):
        taken = {user.args[1] for user in node.users if user.target is operator.getitem}
        if not is_view(node.target):
            yield from (part for at, part in enumerate(made) if isinstance(part, Tensor) and at not in taken)


def _can_overwrite(last: fx.Node, owner: fx.Node) -> bool:
    """Whether Inductor lets the last reader of a value write its own result, of the same size, in its place."""
    return is_elementwise(last) and communication(owner) is None and kept_bytes(owner) == kept_bytes(last)


def _highest(changes: Iterable[int]) -> int:
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak
