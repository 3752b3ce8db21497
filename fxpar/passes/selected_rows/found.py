"""What is known of the nodes of a graph that select rows by masks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from fxpar.ir.capture import example
from fxpar.passes.selected_rows.indexing import Index
from fxpar.passes.selected_rows.rows import Rows


@dataclass(slots=True)
class Found:
    """Nodes by what they have.

    rows: selected rows, in the place of which there are rows for all places of the mask.
    indices: indices of the places that a mask selects, or tuples of them.
    matrices: such indices as columns, of the mask.
    first: the first node that has the same value, as masks have that are computed twice.
    """

    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    indices: dict[fx.Node, tuple[Index, ...]] = field(default_factory=dict)
    matrices: dict[fx.Node, fx.Node] = field(default_factory=dict)
    first: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def first_of(self, node: fx.Node) -> fx.Node:
        """The first node that has the same value; the node itself if it is new in the graph."""
        return self.first.get(node, node)

    def counted_mask(self, node: fx.Node) -> fx.Node | None:
        """The mask of which `node` has the number of places that it selects; None if it has another number."""
        match node.target, node.args:
            case (("sum" | torch.sum), (fx.Node() as mask,)) if example(mask).dtype == torch.bool:
                return self.first_of(mask)
            case torch.ops.aten.sym_size.int, (fx.Node() as sized, int(dim)):
                rows = self.rows.get(sized)
                return self._mask_of(sized) if dim == (0 if rows is None else rows.dim) else None
        return None

    def _mask_of(self, node: fx.Node) -> fx.Node | None:
        """The mask that has selected what `node` has."""
        if node in self.rows:
            return self.rows[node].mask
        return self.indices[node][0].mask if node in self.indices else self.matrices.get(node)
