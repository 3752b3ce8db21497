"""The axes along which all ranks do the same."""

from __future__ import annotations

from fxpar.ir.layout import REPLICATE
from fxpar.ir.node_meta import Placed
from fxpar.layouts.search import AUTOMATIC_AXES
from fxpar.world.mesh import Mesh


def repeated_axes(found: Placed, mesh: Mesh) -> tuple[str, ...]:
    """The automatic axes of several ranks, outermost first, along which an op with these layouts has no shards."""
    layouts = [layout for layout in (*found.inputs, *found.outputs) if layout is not None]
    return tuple(
        axis
        for axis, size in mesh.sizes.items()
        if axis in AUTOMATIC_AXES and size > 1 and all(layout.placement(axis) == REPLICATE for layout in layouts)
    )
