"""Split a graph into regions such that identical layers become identical regions, which are compiled once.

Collectives stay outside of compiled regions, since Inductor would move them: their starts and waits keep their places.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from torch import fx

from fxpar.graph.describe import describe, describe_call
from fxpar.graph.repeats import count_crossings, find_repeats
from fxpar.ir.node_meta import fused, tensor, value
from fxpar.ir.op_predicates import is_collective, is_free_to_recompute, is_view
from fxpar.ir.strides import is_dense

SMALLEST_REGION = 12
"""Repeats of fewer ops stay part of the surrounding region, where Inductor can fuse them with it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Some ops of a graph that one call computes: no path of the graph leaves them and returns.

    `inputs` are the values from outside that it uses, in order of first use. `outputs` are the positions in `nodes` of
    the values that it must return. If a view with gaps or overlaps is used outside, its base is returned instead, and
    the view is taken outside: compiled code returns dense tensors only.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: frozenset[int]

    @property
    def communicates(self) -> bool:
        """Whether this is a single op that starts a collective, waits for one, or is fused with one."""
        return _communicates(self.nodes[0])

    @property
    def is_free(self) -> bool:
        """Whether all of its ops are free, such as views."""
        return all(map(is_free_to_recompute, self.nodes))

    @property
    def signature(self) -> str:
        """The region's computation as text: equal for regions that may share code, on all ranks.

        It has no device index, in which the ranks of a host differ.
        """
        names = {node: f"${index}" for index, node in enumerate(self.inputs)}
        names |= {node: f"%{index}" for index, node in enumerate(self.nodes)}
        lines = [f"{names[node]}: {describe(value(node))}" for node in self.inputs]
        lines += [f"{names[node]}: {describe(value(node))} = {describe_call(node, names)}" for node in self.nodes]
        return "\n".join(lines)


def split_regions(graph: fx.Graph) -> list[Region]:
    """The ops of `graph` as regions, in order.

    If the same ops with the same constants, shapes and strides occur several times in a row, each occurrence is a
    region; the ops between such repeats are regions as well. Starts of collectives, waits for them, and ops fused with
    them divide these further: each is a region of its own. Boundaries are where fewest values cross them, as between
    layers. Module paths are not used: where gradients are summed, or a collective starts before its layer, they do not
    tell which layer an op belongs to.

    Before: embedding, add, [layer_norm, mm, ..., add], [layer_norm, mm, ..., add], layer_norm, mm
    After:  three regions: (embedding, add), the two layers, (layer_norm, mm)
    """
    calls = _at_first_use(_calls(graph))
    if not calls:
        return []
    numbers: dict[str, int] = {}
    labels = [numbers.setdefault(_label(call), len(numbers)) for call in calls]
    cuts = {0, len(calls)}
    for repeat in find_repeats(labels, count_crossings(calls), SMALLEST_REGION):
        cuts.update(range(repeat.start, repeat.stop + 1, repeat.period))
    cuts.update(cut for index, call in enumerate(calls) if _communicates(call[0]) for cut in (index, index + 1))
    pieces = [calls[start:stop] for start, stop in pairwise(sorted(cuts))]
    return [region_of([node for call in piece for node in call]) for piece in pieces]


def _communicates(node: fx.Node) -> bool:
    return is_collective(node) or fused(node) is not None


_Call: TypeAlias = tuple[fx.Node, ...]
"""An op, and the getitem nodes of its results."""


def _calls(graph: fx.Graph) -> list[_Call]:
    """In the graph's order."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    return [(node, *_parts(node)) for node in calls]


def _parts(node: fx.Node) -> list[fx.Node]:
    parts = [user for user in node.users if user.target is operator.getitem]
    return sorted(parts, key=lambda part: str(part.args[1]))


def _at_first_use(calls: Sequence[_Call]) -> list[_Call]:
    """The calls reordered so that free ops, such as views, come right before their first use, in the layer of the user.

    Backward graphs begin with views of what the forward saved, for all layers at once.
    """
    call_of = {node: call for call in calls for node in call}
    ordered: dict[_Call, None] = {}

    def place(call: _Call) -> None:
        for source in call[0].all_input_nodes:
            if source in call_of and call_of[source] not in ordered:
                place(call_of[source])
        ordered[call] = None

    for call in calls:
        is_used = any(user in call_of for node in call for user in node.users if user not in call)
        if call not in ordered and not (is_used and is_free_to_recompute(call[0])):
            place(call)
    return list(ordered)


def region_of(nodes: Sequence[fx.Node]) -> Region:
    """`nodes`, in the graph's order, as a region, with what it uses of the graph and what the graph uses of it."""
    places = {node: index for index, node in enumerate(nodes)}
    used = (source for node in nodes for source in node.all_input_nodes if source not in places)
    leaving = (_leaves_as(node, places) for node in nodes if any(user not in places for user in node.users))
    outputs = (places[node] for node in leaving if node in places)
    return Region(tuple(nodes), tuple(dict.fromkeys(used)), frozenset(outputs))


def _leaves_as(node: fx.Node, inside: Container[fx.Node]) -> fx.Node:
    """`node` if it is dense, otherwise the first of its bases that is dense or from outside."""
    while node in inside and not is_dense(tensor(node)) and (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """The value that `node` is a view of; None if it is no view."""
    if node.target is operator.getitem:
        return _viewed(node.all_input_nodes[0])
    return node.all_input_nodes[0] if is_view(node.target) else None


def _label(call: _Call) -> str:
    """An op with its constants, and the types of its arguments and results, whatever nodes these are."""
    names = {source: describe(value(source)) for node in call for source in node.all_input_nodes}
    return "; ".join(f"{describe(value(node))} = {describe_call(node, names)}" for node in call)
