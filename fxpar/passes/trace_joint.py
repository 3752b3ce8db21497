"""Trace a stage's forward and backward together into one ATen graph, equal layers once."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TypeAlias

from fxpar.errors import UnsupportedGraphError
from fxpar.ir.stage import JointGraph, StageGraph
from fxpar.passes.trace.cut_layers import COST_OF_A_TRACE, cut_layers
from fxpar.passes.trace.join_segments import UnfitCutError, join_segments
from fxpar.passes.trace.segment import Segment, segments
from fxpar.passes.trace.trace_whole import trace_whole
from fxpar.progress.phases import as_phase

Traced: TypeAlias = MutableMapping[str, tuple[Segment, JointGraph]]
"""For each kind of segment, the first one and its joint graph."""

_TRIES = 3
"""How often a stage is cut before it is traced whole; each time, one of the cuts is left out."""

_LARGEST_SHARE = 0.75
"""Of a stage's ops: a stage of which more has to be traced is traced whole, so that no try costs more than it saves."""


@as_phase
def trace_joint(stage: StageGraph, *, with_backward: bool, known: Traced | None = None) -> JointGraph:
    """The joint graph of `stage`, functional and still in logical shapes; forward alone if not `with_backward`.

    Before: torch IR, `h = linear(x, w)`
    After:  ATen, `mm = aten.mm(x, t)`, ..., `dw = aten.mm(dh_t, x)`; placeholders and outputs as `JointGraph` says.

    Every ATen op stays whole: a lowering applies its own decompositions to the local graphs. Of layers that are equal
    but for the names of parameters and modules, AOTAutograd traces one, and the others are copies. The result
    computes what the trace of the whole stage computes, op for op.

    Args:
        known: traces of layers by their kind, from other stages of the same capture; those of this stage are added.

    Raises:
        UnsupportedGraphError: the stage changes in place a value that is neither its own nor a buffer, or calls an op
            whose effects torch orders by effect tokens.
    """
    cuts = cut_layers(stage.module, with_backward=with_backward)
    traced = {} if known is None else known
    for _ in range(_TRIES):
        parts = segments(stage, cuts, with_backward=with_backward)
        if not _is_worth_it(parts, traced):
            break
        try:
            return _from_segments(stage, parts, traced, with_backward)
        except UnfitCutError as unfit:
            del cuts[unfit.position]
        except UnsupportedGraphError:
            break  # the trace of the whole stage names what the user knows
    return _from_equal_stage(stage, traced, with_backward) or trace_whole(stage, with_backward=with_backward)


def _from_equal_stage(stage: StageGraph, traced: Traced, with_backward: bool) -> JointGraph | None:
    """The joint graph of a stage that is one segment, if it has no submodules; None if that cannot be traced."""
    if stage.module.graph.find_nodes(op="get_attr"):
        return None
    try:
        return _from_segments(stage, segments(stage, [], with_backward=with_backward), traced, with_backward)
    except (UnfitCutError, UnsupportedGraphError):
        return None


def _is_worth_it(parts: Sequence[Segment], traced: Traced) -> bool:
    """Whether much less has to be traced than the whole stage."""
    new = {part.kind: len(part.nodes) + COST_OF_A_TRACE for part in parts if part.kind not in traced}
    return sum(new.values()) <= _LARGEST_SHARE * sum(len(part.nodes) for part in parts)


def _from_segments(stage: StageGraph, parts: Sequence[Segment], traced: Traced, with_backward: bool) -> JointGraph:
    for part in parts:
        if part.kind not in traced:
            traced[part.kind] = part, trace_whole(part.graph(stage), with_backward=with_backward)
    return join_segments(stage, parts, [traced[part.kind] for part in parts])
