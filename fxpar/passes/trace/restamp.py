"""Give what was traced from one segment the origin of another segment of the same kind."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.ir.node_meta import known_program_order, module_path, moved_origin
from fxpar.passes.trace.segment import Segment


class Restamp:
    """Called with a node traced from `first`, gives the `meta` that it would have if it were traced from `copy`.

    A node knows by its program order which operation it was traced from; one that autograd added, such as a sum of
    gradients, knows a module at most.
    """

    def __init__(self, first: Segment, copy: Segment) -> None:
        self._is_same = first is copy
        pairs = list(zip(first.nodes, copy.nodes, strict=True))
        self._by_order = {known_program_order(old): new for old, new in pairs}
        self._by_path = {module_path(old): new for old, new in pairs}

    def __call__(self, node: fx.Node) -> dict[str, Any]:
        order = known_program_order(node)
        new = self._by_path.get(module_path(node)) if order is None else self._by_order.get(order)
        return dict(node.meta) if self._is_same or new is None else moved_origin(node, new)
