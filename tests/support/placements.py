"""Lay out joint graphs without a search: as a test says, or at random within what the sharding rules admit."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence

from torch import Tensor, fx

from fxpar.ir.layout import REPLICATE, Layout, Partial, Placement, Replicate, Shard
from fxpar.ir.node_meta import Placed, placed, set_placed, tensor, tensor_operands, value
from fxpar.ir.stage import JointGraph
from fxpar.rules import rule_for
from fxpar.rules.call import op_call
from fxpar.rules.prove import all_seeds
from fxpar.rules.rule import Shape, Strategy
from fxpar.rules.strategies import admissible
from fxpar.world.mesh import Mesh

Choose = Callable[[fx.Node, Sequence[Strategy]], Strategy]
"""Picks one of the strategies that a node can take along an axis."""


def lay_out(joint: JointGraph, mesh: Mesh, choose: Choose) -> None:
    """Place every node of `joint` along the axes y and x of `mesh` as `choose` says."""
    for node in joint.module.graph.nodes:
        if node.target is operator.getitem:
            result = placed(node.args[0]).outputs[node.args[1]]
            assert result is not None, f"{node} is no tensor"
            set_placed(node, Placed((result,), (result,)))
        else:
            set_placed(node, _placed(node, mesh, choose))


def at_random(seed: int) -> Choose:
    """A choice among all strategies, more often one that shards something."""
    generator = random.Random(seed)

    def choose(node: fx.Node, strategies: Sequence[Strategy]) -> Strategy:
        return generator.choice(strategies[1:] or strategies) if generator.random() < 0.8 else strategies[0]

    return choose


def as_told(told: dict[str, Strategy]) -> Choose:
    """The strategy told for the node of a name; all others are replicated."""

    def choose(node: fx.Node, strategies: Sequence[Strategy]) -> Strategy:
        strategy = told.get(node.name, strategies[0])
        assert strategy in strategies, f"{node} cannot run as {strategy}"
        return strategy

    return choose


def _placed(node: fx.Node, mesh: Mesh, choose: Choose) -> Placed:
    inputs, outputs = shapes_of(node)
    layouts = [None if shape is None else Layout(shape) for shape in (*inputs, *outputs)]
    for axis in ("y", "x"):
        if mesh.sizes[axis] > 1:
            fitting = [s for s in _strategies(node, mesh.sizes[axis]) if _fits(layouts, s)]
            strategy = choose(node, fitting)
            placements = (*strategy.inputs, *strategy.outputs)
            layouts = [layout and layout.with_placement(axis, p) for layout, p in zip(layouts, placements, strict=True)]
    needs = [layout for layout in layouts[: len(inputs)] if layout is not None]
    return Placed(tuple(needs), tuple(layouts[len(inputs) :]))


def shapes_of(node: fx.Node) -> tuple[list[Shape], list[Shape | None]]:
    """The logical shapes of a node's tensor operands and of its results."""
    operands: list[Shape] = [tuple(tensor(operand).shape) for operand in tensor_operands(node)]
    found = () if node.op == "output" else value(node)
    results = found if isinstance(found, tuple | list) else (found,)
    return operands, [tuple(item.shape) if isinstance(item, Tensor) else None for item in results]


def _strategies(node: fx.Node, parts: int) -> list[Strategy]:
    """Those that replicate first."""
    inputs, outputs = shapes_of(node)
    if node.op == "call_function":
        call = op_call(node)
        return admissible(call, rule_for(call.target), all_seeds(call, parts))
    found = [Strategy((REPLICATE,) * len(inputs), (REPLICATE,) * len(outputs))]
    if node.op == "placeholder":
        found += [Strategy((), (shard,)) for shard in shards(outputs[0] or (), parts)]
    if node.op == "output":  # each result for itself
        for position, shape in enumerate(inputs):
            before, after = (REPLICATE,) * position, (REPLICATE,) * (len(inputs) - position - 1)
            found += [Strategy((*before, shard, *after), (REPLICATE,) * len(outputs)) for shard in shards(shape, parts)]
    return found


def shards(shape: Shape, parts: int) -> list[Shard]:
    """Every shard that the shape allows, ragged ones among them."""
    found = [Shard(dim, parts, outer) for dim, size in enumerate(shape) for outer in range(1, size + 1)]
    return [shard for shard in found if shard.outer == 1 or shard.fits(shape[shard.dim])]


def _fits(layouts: Sequence[Layout | None], strategy: Strategy) -> bool:
    """Whether an axis can be placed so beside those that are placed already."""
    placements = (*strategy.inputs, *strategy.outputs)
    return all(layout is None or fits(layout, placement) for layout, placement in zip(layouts, placements, strict=True))


def fits(layout: Layout, placement: Placement) -> bool:
    """Whether one more axis can be placed so: digits are held once, and sums and maxima do not mix."""
    if isinstance(placement, Partial):
        return all(placement == other for _, other in layout.axes if isinstance(other, Partial))
    return isinstance(placement, Replicate) or layout.accepts(placement)
