"""The temporary memory of a stage's graphs while they run, beyond their inputs and what stays."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxpar.graph.extract import returned
from fxpar.graph.memory_owners import held_bytes, owner_of
from fxpar.ir.overlap_options import Overlap
from fxpar.ir.stage import JointGraph, PortKind
from fxpar.passes.memory.live_memory import peak_live_bytes
from fxpar.passes.overlap_collectives import overlapping_order
from fxpar.passes.partition import Partitioned
from fxpar.passes.split_backward import SplitBackward
from fxpar.schedule import Kind


def working_bytes(
    joint: JointGraph, parts: Partitioned, halves: SplitBackward | None, overlap: Overlap, *, fuses: bool
) -> dict[Kind, int]:
    """Temporaries in bytes, by kind of action: the peak of its graph, less what `StageMemory` counts elsewhere.

    Counted elsewhere are all results of the forward, and what the backward sends or carries. Gradients of parameters
    are temporaries: they are added to the sums when an action ends.

    Args:
        overlap: how the graphs will be ordered.
        fuses: as of `peak_live_bytes`.
    """
    found: dict[Kind, int] = {"F": _beyond(parts.forward, returned(parts.forward), overlap, fuses)}
    if parts.backward is not None:
        edges = [
            node
            for node, port in zip(returned(parts.backward), joint.gradients, strict=True)
            if port.kind is PortKind.EDGE
        ]
        found["B"] = _beyond(parts.backward, edges, overlap, fuses)
    if halves is not None:
        found["I"] = _beyond(halves.inputs, returned(halves.inputs), overlap, fuses)
        found["W"] = _beyond(halves.weights, [], overlap, fuses)
    return found


def _beyond(module: fx.GraphModule, counted: Iterable[fx.Node], overlap: Overlap, fuses: bool) -> int:
    made = [node for node in counted if owner_of(node).op == "call_function"]
    return max(
        0, peak_live_bytes(module.graph, overlapping_order(module.graph, overlap), fuses=fuses) - held_bytes(made)
    )
