"""Fix the layouts of the edges of a stage that its ranks already have in some layout."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.ir.layout import Layout
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.layouts.pins import Pin


def pin_edges(joint: JointGraph, placement: Sequence[int], earlier: Sequence[StageBorder]) -> dict[Port, Pin]:
    """The pins of edges that another stage at the same place on the pipe axis produces or uses.

    So a rank receives a value once, and needs no redistribution between its stages. `placement` has the place of each
    stage on the pipe axis; `earlier` are the borders of the stages before this one.
    """
    found = {}
    for port in joint.inputs:
        if port.kind is PortKind.EDGE and (layout := _at_hand(port, placement, placement[joint.index], earlier)):
            found[port] = Pin.exactly(layout)
    return found


def _at_hand(port: Port, placement: Sequence[int], place: int, earlier: Sequence[StageBorder]) -> Layout | None:
    beside = [border for border, other in zip(earlier, placement, strict=False) if other == place]
    layouts = [border.outputs.get(port) or border.inputs.get(port) for border in beside]
    return next((layout for layout in layouts if layout is not None), None)
