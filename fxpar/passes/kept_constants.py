"""Tensors that a forward keeps on objects and every rank can compute: tables that it makes when it first needs them.

They depend on constants and on buffers that the forward leaves as they are. What else a forward keeps is in pieces, on
several ranks and for one microbatch after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensor
from fxpar.graph.changes_in_place import changed_sources, storages_mutated_later
from fxpar.graph.min_cut import closure
from fxpar.graph.shared_values import independent_of, is_context
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import known_value
from fxpar.ir.stage import PortKind
from fxpar.progress.phases import as_phase


class KeptConstants:
    """Computes such tensors anew, as each forward does.

    Called, returns them by their positions among all that the compiled function returns.
    """

    def __init__(self, positions: Sequence[int], module: fx.GraphModule, buffers: Sequence[Tensor]) -> None:
        self._positions, self._module, self._buffers = positions, module, buffers

    def __call__(self) -> Mapping[int, Tensor]:
        return dict(zip(self._positions, self._module(*self._buffers), strict=True)) if self._positions else {}


@as_phase
def kept_constants(capture: Capture) -> KeptConstants:
    """Those of the tensors that the forward keeps which are the same on all ranks and for all microbatches.

    Before: `cos = cos(outer(arange(n), inverse)); y = linear(x, w) * cos; return exit(y), cos`
    After:  `return cos(outer(arange(n), inverse))`, a function of the buffer `inverse`
    """
    if not capture.kept:
        return KeptConstants([], capture.module, [])
    order, sources = capture.operations(), capture.sources
    others = {node for node, port in sources.items() if port.kind is not PortKind.BUFFER}
    constants = independent_of(others | changed_sources(order, sources), order)
    tensors = {node for node in constants if isinstance(known_value(node), FakeTensor)}
    kept = {position: node for position, node in capture.kept_nodes().items() if node in tensors}
    wanted = _computing(list(kept.values()), order)
    buffers = {node: port for node, port in sources.items() if not wanted.isdisjoint(node.users)}
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in buffers}
    for node in order:
        enters_or_leaves = is_context(node) and copies.keys() >= set(node.all_input_nodes)  # not a check of a size
        if node in wanted or enters_or_leaves:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in kept.values()))
    held = [capture.buffers[port] for port in buffers.values()]
    return KeptConstants(list(kept), fx.GraphModule(capture.module, graph), held)


def _computing(results: Sequence[fx.Node], order: Sequence[fx.Node]) -> Set[fx.Node]:
    """The operations that compute `results`, and that change them, or what they are computed of, in place."""
    changes: dict[fx.Node, list[fx.Node]] = {}
    for node, change in storages_mutated_later(order):
        changes.setdefault(node, []).append(change)
    operations = set(order)

    def needed(node: fx.Node) -> list[fx.Node]:
        return [each for each in (*node.all_input_nodes, *changes.get(node, ())) if each in operations]

    return closure(results, needed)
