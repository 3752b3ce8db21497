"""Draw random numbers by logical index, so that they are the same on every mesh."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.node_meta import program_order, set_value, value
from fxpar.ir.op_predicates import draws
from fxpar.ir.random import RANDOM_STATE
from fxpar.ir.stage import JointGraph
from fxpar.passes.decompose.redraw import Redraw, Streams
from fxpar.progress.phases import as_phase


@as_phase
def logical_random(joint: JointGraph) -> JointGraph:
    """Replace every random op, if any, by `fxpar::uniform` and arithmetic on it; `RANDOM_STATE` becomes an input.

    Each op draws from its own stream, numbered by its place in the captured program, not in the stage.

    Before: `native_dropout = aten.native_dropout(x, 0.1, True)`
    After:  `streams = fxpar.streams(random, [...])`, `stream = streams[0]`
            `uniform = fxpar.uniform(stream, ...)`, `mask = aten.ge(uniform, 0.1)`, `mul = aten.mul(x, mask)`, ...

    Raises:
        UnsupportedGraphError: an op draws from a distribution that has no replacement.
    """
    drawing = [node for node in joint.module.graph.nodes if draws(node)]
    if not drawing:
        return joint
    streams = Streams(joint.module.graph, _add_state(joint, _device_of(drawing[0])), drawing[0])
    uses: dict[int, int] = {}
    for node in drawing:
        order = program_order(node)
        uses[order] = uses.get(order, 0) + 1
        with joint.module.graph.inserting_before(node):
            Redraw(joint.module.graph, node, streams, number=order * 64 + uses[order]).replace()
    streams.close()
    joint.module.graph.lint()
    joint.module.recompile()
    return replace(joint, inputs=(*joint.inputs, RANDOM_STATE))


def _device_of(drawing: fx.Node) -> torch.device:
    """The device of the results of a random op."""
    return next(given.device for given in pytree.tree_leaves(value(drawing)) if isinstance(given, Tensor))


def _add_state(joint: JointGraph, device: torch.device) -> fx.Node:
    """A placeholder on `device` after the other inputs, before the tangents."""
    placeholders = [node for node in joint.module.graph.nodes if node.op == "placeholder"]
    with fake_mode_of(joint.module.graph):
        state_value = torch.empty(1, 3, dtype=torch.int64, device=device)
    with joint.module.graph.inserting_after(placeholders[len(joint.inputs) - 1]):
        state = joint.module.graph.placeholder("random_state")
    set_value(state, state_value)
    return state
