"""Choose where every value of a stage lies on the automatic mesh axes."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import fx

from fxpar import annotate
from fxpar.annotate import Placed
from fxpar.layout import Layout
from fxpar.layouts.beside import Beside
from fxpar.layouts.border_prices import BorderPrices
from fxpar.layouts.choose import Axis
from fxpar.layouts.dataflow import Border, Operation, operations
from fxpar.layouts.pins import Pin, Pins
from fxpar.layouts.solve_axis import solve_axis
from fxpar.layouts.total_price import total_us
from fxpar.layouts.weights import Wanted, weights_of_products
from fxpar.mesh import Mesh
from fxpar.planner.edge_prices import EdgePrices
from fxpar.planner.prices import Prices
from fxpar.rules.rule import Strategy
from fxpar.stage import JointGraph, Port, StageBorder

AUTOMATIC_AXES = ("x", "y")
"""The axes over which values are laid out by the compiler, in the order in which they are solved first."""

ROUNDS = 2
"""How often each of several axes is solved in an order."""


class _Found(NamedTuple):
    """A layout of everything, and what it costs in microseconds."""

    us: float
    beside: Beside


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

    Along one axis the choice is an integer program (`fxpar.layouts.choose`) over the strategies that the sharding rules
    admit (`fxpar.layouts.candidates`). Axes are solved in turn, each beside the others as they are then, in every
    order; of all that is found the cheapest is taken. Weights of matrix products are used in the shards in which they
    are
    stored, along every axis that their sizes allow (`fxpar.layouts.weights`).

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
    search = _Search(joint, mesh, pins, prices, microbatches, EdgePrices(earlier, mesh, prices.network, placement))
    beside = search.run()
    _annotate(joint, search.program, beside)
    return _border(search.program, beside)


class _Search:
    """Solves one axis beside the others, again and again, and keeps the cheapest of what was found."""

    def __init__(
        self, joint: JointGraph, mesh: Mesh, pins: Pins, prices: Prices, microbatches: int, edges: EdgePrices
    ) -> None:
        self.program = operations(joint)
        self._pins = _pinned_nodes(self.program, pins)
        self._weights = weights_of_products(self.program)
        self._sizes = {axis: mesh.sizes[axis] for axis in AUTOMATIC_AXES if mesh.sizes[axis] > 1}
        self._prices, self._microbatches, self._edges = prices, microbatches, edges

    def run(self) -> Beside:
        """Where everything lies."""
        if not self._sizes:
            return Beside()
        found = [candidate for order in permutations(self._sizes) for candidate in self._in_order(order)]
        return min(found, key=lambda candidate: candidate.us).beside

    def _in_order(self, order: Sequence[str]) -> Iterator[_Found]:
        """Axes solved in this order, each once, then each again beside all others as long as that helps."""
        wanted = {axis: dict.fromkeys(self._weights, Wanted.OWN_DIM) for axis in order}
        chosen: dict[str, list[Strategy]] = {}
        rounds = ROUNDS if len(order) > 1 else 1
        for turn in range(rounds):
            before = dict(chosen)
            for axis in order:
                others = {other: found for other, found in chosen.items() if other != axis}
                if turn and all(before[other] == found for other, found in others.items()):
                    continue  # nothing else is found beside the same
                chosen[axis] = solve_axis(self.program, self._pins, wanted[axis], self._axis(axis, others))
            if chosen != before:
                yield self._weighed(chosen)

    def _axis(self, axis: str, others: Mapping[str, Sequence[Strategy]]) -> Axis:
        """What is given when `axis` is solved beside `others`."""
        beside, shared_by = self._laid_out(others)
        return Axis(axis, self._sizes[axis], self._prices, self._microbatches, beside, shared_by, self._edges)

    def _laid_out(self, chosen: Mapping[str, Sequence[Strategy]]) -> tuple[Beside, list[int]]:
        """The layouts along the chosen axes, and how many ranks share each operation's work."""
        beside, shared_by = Beside(), [1] * len(self.program)
        for axis, strategies in chosen.items():
            beside = beside.along(axis, self.program, strategies)
            parts = self._sizes[axis]
            shared_by = [n * parts if s.divides_work else n for n, s in zip(shared_by, strategies, strict=True)]
        return beside, shared_by

    def _weighed(self, chosen: Mapping[str, Sequence[Strategy]]) -> _Found:
        beside, shared_by = self._laid_out(chosen)
        border = BorderPrices(self._prices, self._sizes, self._microbatches, self._edges)
        return _Found(total_us(self.program, beside, shared_by, self._prices, self._sizes, border), beside)


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
