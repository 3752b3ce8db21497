"""Choose where every value of a stage lies on the automatic mesh axes."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxpar import annotate
from fxpar.annotate import Placed
from fxpar.errors import InfeasibleLayoutError
from fxpar.layout import Layout
from fxpar.layouts.beside import Beside
from fxpar.layouts.candidates import Candidates
from fxpar.layouts.choose import Axis, choose
from fxpar.layouts.dataflow import Border, Operation, Value, derived_from, operations, small_constants
from fxpar.layouts.pins import Pin, Pins
from fxpar.layouts.prune import prune
from fxpar.mesh import Mesh
from fxpar.planner.edge_prices import EdgePrices
from fxpar.planner.prices import Prices
from fxpar.rules.rule import Strategy
from fxpar.stage import JointGraph, Port, StageBorder

AUTOMATIC_AXES = ("x", "y")
"""The axes over which values are laid out by the compiler, in the order in which they are solved."""


def propagate_layouts(
    joint: JointGraph,
    mesh: Mesh,
    pins: Pins,
    prices: Prices,
    microbatches: int,
    earlier: Sequence[StageBorder] = (),
    placement: Sequence[int] | None = None,
) -> StageBorder:
    """Give every node of `joint` its `annotate.Placed`, at the least cost, and say how the border lies.

    Each node records the layouts in which it needs its operands and gives its results; where a use needs another
    layout than its producer gives, the value must be moved. An item of a tuple needs and gives the layout of the
    producer's result; a placeholder only gives, the output node only needs.

    Axes are solved one after another, each with the ones before fixed. Along each the choice is an integer program
    (`fxpar.layouts.choose`) over the strategies that the sharding rules admit (`fxpar.layouts.candidates`).

    Before: `h = mm(x, w1); y = mm(h, w2)`, w1 pinned to columns over x and w2 to rows
    After:  the same, where h lies as `[m, x*n/x]` and y as `[m, k] P(sum)@x`, which its reader needs reduced

    Args:
        pins: the layouts that hints and other stages have settled. Forward inputs and buffers are replicated.
        microbatches: how many of them share one reduction of a parameter's gradient.
        earlier: how the stages before this one lie, whose edges it uses.
        placement: of each stage on the pipe axis; by default stage s is at s.

    Raises:
        InfeasibleLayoutError: the pins cannot all be met.
    """
    program = operations(joint)
    by_node = _pinned_nodes(program, pins)
    beside = Beside()
    done = [1] * len(program)
    edges = EdgePrices(earlier, mesh, prices.network, placement)
    for axis in AUTOMATIC_AXES:
        parts = mesh.sizes[axis]
        if parts > 1:
            chosen = _solve(program, by_node, Axis(axis, parts, prices, microbatches, beside, done, edges))
            beside = _settle(program, chosen, axis, beside)
            done = [n * parts if strategy.divides_work else n for n, strategy in zip(done, chosen, strict=True)]
    _annotate(joint, program, beside)
    return _border(program, beside)


def _pinned_nodes(program: Sequence[Operation], pins: Pins) -> dict[fx.Node, Pin]:
    """The pins by the node that makes the pinned value: placeholders, and hints inside the forward."""
    found: dict[fx.Node, Pin] = {}
    for operation in program:
        if operation.border is Border.INPUT and operation.port is not None and operation.port in pins.inputs:
            found[operation.node] = pins.inputs[operation.port]
        elif operation.node.target is torch.ops.fxpar.shard.default:
            spec = json.loads(str(operation.node.args[1]))
            found[operation.node] = Pin({axis: (dim, None) for dim, axis in enumerate(spec) if axis is not None})
    return found


def _solve(program: Sequence[Operation], pins: Mapping[fx.Node, Pin], axis: Axis) -> list[Strategy]:
    frozen = small_constants(program) - pins.keys()
    strategies = Candidates(program, axis.name, axis.parts, pins, frozen, axis.beside).find()
    for operation, found in zip(program, strategies, strict=True):
        if not found:
            raise InfeasibleLayoutError(_no_strategy(operation, pins[operation.node], axis))
    immovable = derived_from(program, {node for node, pin in pins.items() if pin.fixed_at_use})
    possible = prune(program, strategies, immovable.keys())
    chosen = choose(program, possible, axis, immovable.keys()) if all(possible) else None
    if chosen is None:
        raise InfeasibleLayoutError(_conflict(program, strategies, axis, immovable))
    return [found[k] for found, k in zip(possible, chosen, strict=True)]


def _settle(program: Sequence[Operation], chosen: Sequence[Strategy], axis: str, beside: Beside) -> Beside:
    """`beside` with the strategies of one more axis."""
    given: dict[Value, Layout] = {}
    needed: dict[tuple[int, int], Layout] = {}
    for number, (operation, strategy) in enumerate(zip(program, chosen, strict=True)):
        for position, (value, placement) in enumerate(zip(operation.operands, strategy.inputs, strict=True)):
            needed[number, position] = beside.operand(number, position, value).with_placement(axis, placement)
        for result, placement in zip(operation.results, strategy.outputs, strict=True):
            if result is not None:
                given[result] = beside.result(result).with_placement(axis, placement)
    return Beside(given, needed)


def _annotate(joint: JointGraph, program: Sequence[Operation], beside: Beside) -> None:
    leaving: list[Layout] = []
    for number, operation in enumerate(program):
        inputs = tuple(beside.operand(number, i, value) for i, value in enumerate(operation.operands))
        outputs = tuple(None if value is None else beside.result(value) for value in operation.results)
        if operation.node.op == "output":
            leaving += inputs
            annotate.set_placed(operation.node, Placed(tuple(leaving), ()))
        else:
            annotate.set_placed(operation.node, Placed(inputs, outputs))
    for node in joint.module.graph.nodes:
        if node.target is operator.getitem:
            source, index = node.args
            layout = annotate.placed(source).outputs[index]
            assert layout is not None, f"{node} takes no tensor from {source}"
            annotate.set_placed(node, Placed((layout,), (layout,)))


def _border(program: Sequence[Operation], beside: Beside) -> StageBorder:
    sides: dict[Border, dict[Port, Layout]] = {border: {} for border in Border}
    for number, operation in enumerate(program):
        if operation.border is not None and operation.port is not None:
            (value,) = operation.values
            layout = beside.operand(number, 0, value) if operation.operands else beside.result(value)
            sides[operation.border][operation.port] = layout
    return StageBorder(sides[Border.INPUT], sides[Border.OUTPUT], sides[Border.TANGENT], sides[Border.GRADIENT])


def _no_strategy(operation: Operation, pin: Pin, axis: Axis) -> str:
    shape = tuple(operation.values[-1].tensor.shape)
    wanted = f"shard dim {pin.shards[axis.name][0]}" if axis.name in pin.shards else "replicate"
    return (
        f"{operation} has shape {shape} and is pinned to {wanted} over {axis.name} ({axis.parts} ranks), "
        "which none of its uses can take; hint another dim, or leave the hint out"
    )


def _conflict(
    program: Sequence[Operation],
    strategies: Sequence[Sequence[Strategy]],
    axis: Axis,
    immovable: Mapping[Value, Sequence[Port]],
) -> str:
    """Which hinted weights would have to move for a solution to exist."""
    chosen = choose(program, strategies, axis, immovable.keys(), penalty_us=1e9)
    if chosen is None:
        return f"no layouts over {axis.name} ({axis.parts} ranks) meet what the stage's neighbours and hints ask for"
    picked = [found[k] for found, k in zip(strategies, chosen, strict=True)]
    given = {
        value: placement
        for operation, strategy in zip(program, picked, strict=True)
        for value, placement in zip(operation.results, strategy.outputs, strict=True)
        if value is not None
    }
    moved = [
        f"{_listed(immovable[value])}: placed as {given[value]}, but needed as {placement} by {operation}"
        for operation, strategy in zip(program, picked, strict=True)
        for value, placement in zip(operation.operands, strategy.inputs, strict=True)
        if value in immovable and given[value] != placement
    ]
    return (
        f"the hints conflict over {axis.name} ({axis.parts} ranks). A hinted weight is used as it lies, but these "
        "would have to be gathered or sliced:\n  " + "\n  ".join(moved) + "\nchange or remove the hint of one of them"
    )


def _listed(ports: Sequence[Port]) -> str:
    return " and ".join(map(str, ports))
