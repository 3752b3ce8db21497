"""Lower the graphs that the schedule runs."""

from __future__ import annotations

from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import CompiledGathers, CompiledReductions, CompiledSplit, CompiledStage
from fxpar.lowering import Lowering
from fxpar.lowering.aten import lower_to_aten
from fxpar.passes.hoist_storage import Gathers, Reductions
from fxpar.passes.split_backward import SplitBackward
from fxpar.passes.stage_graphs import RunGraphs
from fxpar.progress.phases import as_phase


@as_phase
def lower_stage(graphs: RunGraphs, lowering: Lowering) -> CompiledStage:
    """Lower the graphs of one stage that the schedule runs to callables."""
    return CompiledStage(
        graphs.index,
        lowering(graphs.forward),
        None if graphs.backward is None else lowering(graphs.backward),
        graphs.inputs,
        graphs.outputs,
        graphs.tangents,
        graphs.gradients,
        graphs.border,
        graphs.input_pieces,
        graphs.tangent_pieces,
        graphs.gradient_dtypes,
        None if graphs.halves is None else _lower_split(graphs.halves, lowering),
        None if graphs.gathers is None else _lower_gathers(graphs.gathers),
        None if graphs.reductions is None else _lower_reductions(graphs.reductions),
        graphs.buffers_of_step,
    )


def _lower_split(halves: SplitBackward, lowering: Lowering) -> CompiledSplit:
    return CompiledSplit(lowering(halves.inputs), lowering(halves.weights), halves.inputs_saved, halves.weights_saved)


# Graphs that run once per step are collectives and copies, which compiling would not make faster.


def _lower_gathers(gathers: Gathers) -> CompiledGathers:
    pieces = tuple(tensor(node) for node in gathers.module.graph.find_nodes(op="placeholder"))
    return CompiledGathers(tuple(port.name for port in gathers.ports), lower_to_aten(gathers.module), pieces)


def _lower_reductions(reductions: Reductions) -> CompiledReductions:
    names = tuple(port.name for port in reductions.ports)
    return CompiledReductions(names, lower_to_aten(reductions.start), lower_to_aten(reductions.finish))
