"""Split a stage's backward into I, the gradients that other stages wait for, and W, those that can wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.graph.extract import check_nothing_runs_twice, copy_parts, extract, returned
from fxpar.graph.min_cut import closure, min_cut_values, operands, users
from fxpar.ir.op_predicates import has_effect, is_free_to_recompute
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.partition import Partitioned, saved_ports
from fxpar.progress.phases import as_phase


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """`inputs` (I) and `weights` (W) together return what the whole backward returns.

    `inputs(*(saved[i] for i in inputs_saved), *tangents)` returns the gradients of what comes from other stages (ports
    of kind EDGE) in the order of `JointGraph.gradients`, then `num_carried` values.
    `weights(*(saved[i] for i in weights_saved), *carried)` returns all other gradients, in order.

    Saved values that are not in `weights_saved` can be freed when I has run; the others, and the carried, when W has.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule
    inputs_saved: tuple[int, ...]
    weights_saved: tuple[int, ...]
    num_carried: int


@as_phase
def split_backward(joint: JointGraph, parts: Partitioned) -> SplitBackward:
    """Split the backward of `parts`, which `partition` made of `joint`, as zero-bubble schedules need it.

    I has the ops that the gradients of edges need, and the side effects that no weight's gradient needs. W has the
    rest. Views are recomputed in W rather than carried; no other op runs twice. The values that cross are a minimum cut
    of the bytes held until W; parameters, buffers and inputs of the step cross for free.
    Source: backward weight delaying (Zhuang et al., "On Optimizing the Communication of Model Parallelism", section 4)
    and zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", section 2).

    Before: `dx = aten.mm(dy, w); t = aten.t(dy); dw = aten.mm(t, x)`
    After:  I `dx = aten.mm(dy, w)`, carrying `dy`; W `t = aten.t(dy); dw = aten.mm(t, x)`
    """
    assert parts.backward is not None, "a forward-only program has no backward to split"
    backward = parts.backward
    borders = _BackwardBorder.of(joint, parts, backward)
    crossing = _choose_crossing(backward, borders)
    kept = [node for node in crossing if node in borders.saved]
    carried = [node for node in crossing if node not in borders.saved]
    given = [*borders.edge_gradients, *carried]
    needed = closure([*given, *borders.early_effects], operands)
    taken = [node for node in borders.saved if node in needed]
    nodes = list(backward.graph.nodes)
    inputs = extract(backward, nodes, [*taken, *borders.tangents], given, borders.early_effects)
    weights = extract(backward, nodes, [*kept, *carried], borders.weight_gradients, [])
    check_nothing_runs_twice(inputs, weights)
    copy_parts(inputs, len(borders.edge_gradients))
    return SplitBackward(inputs, weights, _positions(taken, borders), _positions(kept, borders), len(carried))


@dataclass(frozen=True, slots=True)
class _BackwardBorder:
    """The nodes at the border of a backward graph; `resident` saved values are in memory for the whole step."""

    saved: list[fx.Node]
    resident: set[fx.Node]
    tangents: list[fx.Node]
    edge_gradients: list[fx.Node]
    weight_gradients: list[fx.Node]
    early_effects: list[fx.Node]

    @staticmethod
    def of(joint: JointGraph, parts: Partitioned, backward: fx.GraphModule) -> _BackwardBorder:
        placeholders = backward.graph.find_nodes(op="placeholder")
        gradients = list(zip(joint.gradients, returned(backward), strict=True))
        late = [node for port, node in gradients if port.kind is not PortKind.EDGE]
        for_weights = closure(late, operands)
        return _BackwardBorder(
            placeholders[: parts.num_saved],
            {node for node, port in zip(placeholders, saved_ports(joint, parts), strict=False) if _is_resident(port)},
            placeholders[parts.num_saved :],
            [node for port, node in gradients if port.kind is PortKind.EDGE],
            late,
            [node for node in backward.graph.nodes if has_effect(node) and node not in for_weights],
        )

    @property
    def early(self) -> set[fx.Node]:
        """All nodes that I needs."""
        return closure([*self.edge_gradients, *self.early_effects], operands)


def _choose_crossing(backward: fx.GraphModule, borders: _BackwardBorder) -> list[fx.Node]:
    """The values that W takes, out of the saved values, the tangents, and what I computes anyway."""
    early = borders.early | {*borders.saved, *borders.tangents}
    wanted = closure(borders.weight_gradients, operands)
    late = closure((node for node in wanted - early if not is_free_to_recompute(node)), users)
    may_be_early = wanted - late
    undecided = [node for node in backward.graph.nodes if node in may_be_early]
    leaving = {*borders.weight_gradients, *(operand for node in wanted & late for operand in node.all_input_nodes)}
    return min_cut_values(undecided, early, leaving, borders.resident)


def _is_resident(port: Port | None) -> bool:
    return port is not None and port.kind in (PortKind.PARAMETER, PortKind.BUFFER, PortKind.INPUT)


def _positions(taken: Sequence[fx.Node], borders: _BackwardBorder) -> tuple[int, ...]:
    return tuple(borders.saved.index(node) for node in taken)
