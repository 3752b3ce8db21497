"""Choose the layout of every value of a stage on the automatic mesh axes, y and x."""

from __future__ import annotations

import json
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxpar.costs.dataflow import Border, Operation, operations
from fxpar.costs.edge_prices import EdgePrices
from fxpar.costs.prices import Prices
from fxpar.errors import OpsWithoutRuleWarning
from fxpar.errors.base import some_of
from fxpar.ir import node_meta
from fxpar.ir.layout import REPLICATE, Layout
from fxpar.ir.node_meta import Placed
from fxpar.ir.random import RANDOM_STATE
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.layouts.pins import Pin, Pins
from fxpar.layouts.search import AUTOMATIC_AXES, Search
from fxpar.layouts.search_once import Searched, search_once
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.layouts.weights import weights_of_products
from fxpar.progress.phases import as_phase
from fxpar.rules.lookup import rule_for
from fxpar.world.mesh import Mesh

_NAMED = 5
"""How many weights a warning names."""


@as_phase
def propagate_layouts(
    joint: JointGraph,
    mesh: Mesh,
    pins: Pins,
    prices: Prices,
    microbatches: int,
    earlier: Sequence[StageBorder] = (),
    placement: Sequence[int] | None = None,
    known: Searched | None = None,
) -> StageBorder:
    """Set the `node_meta.Placed` of every node of `joint`, at the least cost; returns the layouts of the border.

    `Placed` has the layouts in which a node needs its operands and returns its results. Where a use needs another
    layout than its producer returns, the value must be redistributed. An item of a tuple needs and returns the layout
    of the producer's result; a placeholder only returns, the output node only needs.

    Along one axis the choice is an integer program (`fxpar.layouts.choose`) over the strategies that the sharding rules
    admit (`fxpar.layouts.candidates`). Axes are solved one at a time, with the layouts along the others fixed, in every
    order; the cheapest result is taken. Weights of matrix products are used as the shards that they are stored in,
    along every axis that their sizes allow (`fxpar.layouts.weights`).

    Before: `h = mm(x, w1); y = mm(h, w2)`, w1 pinned to columns over x and w2 to rows
    After:  the same, where h is `[m, x*n/x]` and y is `[m, k] P(sum)@x`, which its consumer needs reduced

    Args:
        pins: the layouts that hints and other stages have fixed. Forward inputs and buffers are replicated.
        microbatches: how many of them share one reduction of a parameter's gradient.
        earlier: the borders of the stages before this one, whose edges it uses.
        placement: of each stage on the pipe axis; by default stage s is at s.
        known: what was searched for other stages, which equal ones take over; this search is added.

    Raises:
        InfeasibleLayoutError: the pins cannot all be met.
    """
    program = operations(joint)
    by_node = _pinned_nodes(program, pins)
    edges = EdgePrices(earlier, mesh, prices.network, placement)
    search = Search(program, by_node, mesh, prices, microbatches, edges)
    solved = SolvedAxes.of(program, search_once(search, known))
    _warn_of_replicas(program, by_node, mesh, solved)
    _warn_of_ops_without_rule(program, mesh)
    _annotate(joint, program, solved)
    return _border(program, solved)


def _pinned_nodes(program: Sequence[Operation], pins: Pins) -> dict[fx.Node, Pin]:
    """The pins by the node of the pinned value: placeholders, and hints inside the forward."""
    found: dict[fx.Node, Pin] = {}
    for operation in program:
        if operation.border is Border.INPUT and operation.port is not None and operation.port in pins.inputs:
            found[operation.node] = pins.inputs[operation.port]
        elif operation.node.target is torch.ops.fxpar.shard.default:
            spec = json.loads(str(operation.node.args[1]))
            found[operation.node] = Pin({axis: (dim, None) for dim, axis in enumerate(spec) if axis is not None})
    return found


def _warn_of_replicas(
    program: Sequence[Operation], pins: Mapping[fx.Node, Pin], mesh: Mesh, solved: SolvedAxes
) -> None:
    """Warn of weights of matrix products that are replicated along an axis without a hint to do so."""
    weights = set(weights_of_products(program))
    for axis in (axis for axis in AUTOMATIC_AXES if mesh.sizes[axis] > 1):
        whole = [
            op
            for op in program
            if op.node in weights
            and op.border is Border.INPUT
            and not (op.node in pins and pins[op.node].settles(axis))
            and solved.result(op.values[0]).placement(axis) == REPLICATE
        ]
        if whole:
            names = some_of([op.port.name for op in whole if op.port is not None], _NAMED)
            num_bytes = sum(op.values[0].num_bytes for op in whole)
            warnings.warn(
                f"all ranks along {axis} ({mesh.sizes[axis]}) hold the same of {len(whole)} weights "
                f"({num_bytes / 1e6:.1f} MB): {names}; their sizes do not divide, or no rule lets ranks share "
                "their products (see fxpar.register_rule)",
                stacklevel=2,
            )


def _warn_of_ops_without_rule(program: Sequence[Operation], mesh: Mesh) -> None:
    """Warn of ops that every rank along an automatic axis computes whole, since they have no sharding rule.

    Ops on what is known without data, parameters and other stages, such as positions and random numbers, and ops that
    return a single number cost nothing worth a warning.
    """
    axes = [axis for axis in AUTOMATIC_AXES if mesh.sizes[axis] > 1]
    found: Counter[str] = Counter()
    reached: set[fx.Node] = set()
    for op in program if axes else ():
        if op.port is not None:
            is_known = op.port.kind is PortKind.BUFFER or op.port == RANDOM_STATE
            reached.update([] if is_known else [op.node])
        elif any(value.node in reached for value in op.operands):
            reached.add(op.node)
            if op.call is not None and rule_for(op.call.target) is None and _returns_several(op):
                found[str(op.call.target)] += 1
    if found:
        warnings.warn(OpsWithoutRuleWarning(found, axes), stacklevel=2)


def _returns_several(op: Operation) -> bool:
    return any(value is not None and value.tensor.numel() > 1 for value in op.results)


def _annotate(joint: JointGraph, program: Sequence[Operation], solved: SolvedAxes) -> None:
    leaving: list[Layout] = []
    for number, operation in enumerate(program):
        inputs = tuple(solved.operand(number, i, value) for i, value in enumerate(operation.operands))
        outputs = tuple(None if value is None else solved.result(value) for value in operation.results)
        if operation.node.op == "output":
            leaving += inputs
        else:
            node_meta.set_placed(operation.node, Placed(inputs, outputs))
    node_meta.set_placed(joint.module.graph.output_node(), Placed(tuple(leaving), ()))
    for node in joint.module.graph.nodes:
        if node.target is operator.getitem:
            source, index = node.args
            layout = node_meta.placed(source).outputs[index]
            assert layout is not None, f"{node} takes no tensor from {source}"
            node_meta.set_placed(node, Placed((layout,), (layout,)))


def _border(program: Sequence[Operation], solved: SolvedAxes) -> StageBorder:
    sides: dict[Border, dict[Port, Layout]] = {border: {} for border in Border}
    for number, operation in enumerate(program):
        if operation.border is not None and operation.port is not None:
            (value,) = operation.values
            layout = solved.operand(number, 0, value) if operation.operands else solved.result(value)
            sides[operation.border][operation.port] = layout
    return StageBorder(sides[Border.INPUT], sides[Border.OUTPUT], sides[Border.TANGENT], sides[Border.GRADIENT])
