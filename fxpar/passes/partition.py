"""Split a joint graph into forward and backward, so that few bytes are saved in between."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import fx

from fxpar.graph.extract import append_after_operands, check_nothing_runs_twice, copy_parts, extract, returned
from fxpar.graph.min_cut import closure, min_cut_values, operands, users
from fxpar.graph.recompute import Recomputed, choose_recomputed
from fxpar.ir.node_meta import is_backward
from fxpar.ir.op_predicates import has_effect
from fxpar.ir.remat import NO_REMAT, Remat
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.progress.phases import as_phase


@dataclass(frozen=True, slots=True)
class Partitioned:
    """`forward(*inputs)` returns the outputs, then `num_saved` values; `backward(*saved, *tangents)` the gradients.

    Inputs that the backward needs are among the saved values, uncopied: they must not change in between. `backward` is
    None if there are no gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_saved: int


@as_phase
def partition(joint: JointGraph, remat: Remat = NO_REMAT) -> Partitioned:
    """Split `joint` by data dependencies.

    The forward has all nodes that its outputs need. The other nodes that depend on no tangent are divided by a minimum
    cut of the bytes that cross. Parameters cross for free. Views are recomputed in the backward rather than saved; of
    other ops only those that `remat` allows run twice, as late as possible in the backward.

    Before: `mm = aten.mm(x, w); relu = aten.relu(mm); mask = aten.gt(relu, 0); dm = aten.mul(tangent, mask)`
    After:  forward `mm`, `relu`, `mask`, saving `mask`; backward `dm = aten.mul(tangent, mask)`
    """
    borders = _JointBorder.of(joint)
    nodes = list(joint.module.graph.nodes)
    if not borders.gradients:
        forward = extract(joint.module, nodes, borders.inputs, borders.outputs, borders.effects_before)
        return Partitioned(forward, None, 0)
    recomputed = choose_recomputed(joint, remat)
    saved = _choose_saved(joint, borders, recomputed)
    early = _with_layers(nodes)
    forward = extract(joint.module, early, borders.inputs, [*borders.outputs, *saved], borders.effects_before)
    given = [*saved, *borders.tangents]
    late = _when_needed(nodes, given, closure(borders.tangents, users))
    backward = extract(joint.module, late, given, borders.gradients, borders.effects_after)
    check_nothing_runs_twice(forward, backward, but={node.name for node in recomputed.again})
    copy_parts(forward, len(borders.outputs))
    return Partitioned(forward, backward, len(saved))


@dataclass(frozen=True, slots=True)
class _JointBorder:
    """The nodes at the border of a joint graph, and those inside that have side effects."""

    inputs: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node]
    effects_before: list[fx.Node]
    effects_after: list[fx.Node]

    @staticmethod
    def of(joint: JointGraph) -> _JointBorder:
        graph = joint.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        inputs, tangents = placeholders[: len(joint.inputs)], placeholders[len(joint.inputs) :]
        after = closure(tangents, users)
        effects = [node for node in graph.nodes if has_effect(node)]
        return _JointBorder(
            inputs,
            tangents,
            returned(joint.module)[: len(joint.outputs)],
            returned(joint.module)[len(joint.outputs) :],
            [node for node in effects if node not in after],
            [node for node in effects if node in after],
        )


def _choose_saved(joint: JointGraph, borders: _JointBorder, recomputed: Recomputed) -> list[fx.Node]:
    """The values that the forward saves for the backward."""
    before = closure([*borders.outputs, *borders.effects_before], operands) | {*borders.inputs}
    after = closure(borders.tangents, users)
    wanted = closure([*borders.gradients, *borders.effects_after], operands)
    may_be_saved = wanted - after
    undecided = [node for node in joint.module.graph.nodes if node in may_be_saved]
    leaving = {*borders.gradients, *(operand for node in wanted & after for operand in node.all_input_nodes)}
    free = _free_to_keep(joint, borders)
    return min_cut_values(undecided, before, leaving, free, recomputed.again, recomputed.dropped)


def _free_to_keep(joint: JointGraph, borders: _JointBorder) -> set[fx.Node]:
    """Parameters and buffers: in memory anyway. (Autograd refuses to use a buffer that the forward has changed.)"""
    stays = {PortKind.PARAMETER, PortKind.BUFFER}
    return {node for node, port in zip(borders.inputs, joint.inputs, strict=True) if port.kind in stays}


def _with_layers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes, with those tagged as backward right after their operands: in their layer, if the forward runs them."""
    places: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        made = [places[operand] for operand in node.all_input_nodes]
        places[node] = max(made) if is_backward(node) and made else index
    return sorted(nodes, key=places.__getitem__)


def _when_needed(nodes: Sequence[fx.Node], given: Sequence[fx.Node], late: AbstractSet[fx.Node]) -> list[fx.Node]:
    """The `given` nodes, then the `late` ones in order, and every other right before the first that needs it."""
    ordered = dict.fromkeys(given)
    for node in nodes:
        if node in late or node.op == "output":
            append_after_operands(node, ordered)
    return list(ordered)


def saved_ports(joint: JointGraph, parts: Partitioned) -> list[Port | None]:
    """For each value that `parts` saves, its port if it is an input; None if the forward computes it."""
    ports = dict(zip(parts.forward.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    return [ports.get(node) for node in returned(parts.forward)[len(joint.outputs) :]]
