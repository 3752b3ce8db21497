"""Choose one strategy per operation, for all operations together: layouts as an integer program.

Each operation is a one-hot vector over its strategies. Each use of a value is a matrix whose entry [p, q] is 1 if the
value is made in placement p and needed in q; its row and column sums are the one-hots of producer and consumer, added
up over strategies that agree on this value. In this form the relaxation is nearly always integral, so that the
matrices may be continuous. A redistribution that several uses need is one more variable, which bounds all their
entries: it is paid once. Operations of equal layers share a one-hot, and their uses share matrices, whose costs are
multiplied by the number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from fxpar.costs.dataflow import Border, Operation, Value, roots
from fxpar.costs.edge_prices import EdgePrices
from fxpar.costs.op_cost import work_us
from fxpar.costs.prices import Prices
from fxpar.graph.redistribute import RedistributeKind
from fxpar.ir import node_meta
from fxpar.ir.layout import REPLICATE, Layout, Partial, Placement
from fxpar.layouts.border_prices import BorderPrices
from fxpar.layouts.charge_redistribution import charge_redistribution
from fxpar.layouts.integer_program import IntegerProgram
from fxpar.layouts.layer_sharing import share_layers
from fxpar.layouts.redistribution_prices import RedistributionPrices
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.layouts.weights import is_product
from fxpar.rules.rule import Strategy

_TIE_US = 1e-4
"""The cost per position in an operation's list of strategies: a tie-break, so that all ranks choose the same."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The mesh axis to choose for: its size, its prices, and the layouts along the axes that are solved already.

    `done[i]` ranks share operation i's work along those axes; `edges` prices the transfers between stages. `ahead` are
    the axes that are still to be solved, with their sizes: each will shard a dim of every weight that is left whole.
    """

    name: str
    parts: int
    prices: Prices
    microbatches: int
    solved: SolvedAxes
    done: Sequence[int]
    edges: EdgePrices
    ahead: Mapping[str, int] = field(default_factory=dict)


class _Source(NamedTuple):
    """Result `position` of operation number `operation`, also for all operations that share its one-hot."""

    operation: int
    position: int


@dataclass(frozen=True, slots=True)
class _Use:
    """Operand `position` of operation number `reader`; the entries of its matrix are variables."""

    reader: int
    position: int
    entries: Mapping[tuple[Placement, Placement], int]


def choose(
    program: Sequence[Operation],
    strategies: Sequence[Sequence[Strategy]],
    axis: Axis,
    immovable: Set[Value],
    *,
    penalty_us: float | None = None,
) -> list[int] | None:
    """The index of the cheapest strategy of each operation, or None if they cannot be combined.

    Values in `immovable` are neither gathered nor sliced, but partial sums of them may be reduced; with `penalty_us`
    all may be redistributed, at that additional cost.
    """
    shared = share_layers(program, strategies, immovable, axis.solved, axis.done)
    for first in dict.fromkeys((shared, tuple(range(len(program))))):  # without sharing if that is infeasible
        chooser = _Chooser(program, strategies, axis, immovable, penalty_us, first)
        solution = chooser.formulate().solve()
        if solution is not None:
            return [
                max(range(len(choices)), key=lambda k: sum(solution[x] for x in choices[k]))
                for choices in chooser.one_hots
            ]
    return None


class _Chooser:
    """Builds the integer program; operation i has the one-hot of operation `first[i]`, which is i or before it."""

    def __init__(
        self,
        program: Sequence[Operation],
        strategies: Sequence[Sequence[Strategy]],
        axis: Axis,
        immovable: Set[Value],
        penalty_us: float | None,
        first: Sequence[int],
    ) -> None:
        self._program, self._strategies, self._axis = program, strategies, axis
        self._immovable, self._penalty_us, self._first = immovable, penalty_us, first
        self._ip = IntegerProgram()
        self._prices = RedistributionPrices(axis.name, axis.parts, axis.prices, prod(axis.ahead.values()))
        self._border = BorderPrices(axis.prices, {axis.name: axis.parts}, axis.microbatches, axis.edges)
        self._sources: dict[Value, _Source] = {}
        self._given: dict[_Source, dict[Placement, list[int]]] = {}
        self._followed: dict[int, _Source] = {}
        self._matrices: dict[tuple[_Source, int, int], _Use] = {}
        self._uses: dict[Value, list[_Use]] = {}
        self._num_uses = Counter(value for operation in program for value in operation.operands)
        self.one_hots: list[list[list[int]]] = []

    def formulate(self) -> IntegerProgram:
        times = Counter(self._first)
        for number, operation in enumerate(self._program):
            if self._first[number] == number:
                self._add_choices(number, operation, times[number])
            else:
                self.one_hots.append(self.one_hots[self._first[number]])
            self._add_uses(number, operation)
            for position, result in enumerate(operation.results):
                if result is not None:
                    self._sources[result] = _Source(self._first[number], position)
        self._price_moves()
        self._price_saved()
        self._tie_gradients()
        return self._ip

    def _add_choices(self, number: int, operation: Operation, times: int) -> None:
        """Add the one-hot of an operation that occurs `times` times in the program."""
        strategies = self._strategies[number]
        if self._follows(number, operation):
            source = self._followed[number] = self._sources[operation.operands[0]]
            self.one_hots.append([self._given[source].get(strategy.inputs[0], []) for strategy in strategies])
        else:
            self.one_hots.append([[self._ip.variable(integral=True)] for _ in strategies])
            self._ip.equal([(x, 1) for (x,) in self.one_hots[number]], 1)
        for place, strategy in enumerate(strategies):
            us = self._strategy_us(number, operation, strategy) + place * _TIE_US
            for x in self.one_hots[number][place]:
                self._ip.add_cost(x, us * times)
        for position, result in enumerate(operation.results):
            if result is not None:
                outputs = [strategy.outputs[position] for strategy in strategies]
                self._given[_Source(number, position)] = self._grouped(number, outputs)

    def _add_uses(self, number: int, operation: Operation) -> None:
        """Tie an operation's one-hot to those of the operations whose results it uses."""
        first = self._first[number]
        for position, value in enumerate(operation.operands):
            source = self._sources[value]
            if self._followed.get(first) != source:
                key = (source, first, position)
                if key not in self._matrices:
                    needed = self._grouped(first, [s.inputs[position] for s in self._strategies[first]])
                    self._matrices[key] = _Use(first, position, self._matrix(value, self._given[source], needed))
                self._uses.setdefault(value, []).append(self._matrices[key])

    def _follows(self, number: int, operation: Operation) -> bool:
        """Whether an op can take over its operand's choice, which saves variables: a view that is its only use.

        Nothing is lost: a redistribution before the view can as well be made after it.
        """
        if not operation.is_view or len(operation.values) != 2:
            return False
        operand, result = operation.values
        needed = [strategy.inputs[0] for strategy in self._strategies[number]]
        return (
            self._num_uses[operand] == 1
            and operand.num_bytes == result.num_bytes
            and node_meta.is_backward(operand.node) == node_meta.is_backward(operation.node)
            and len(set(needed)) == len(needed)
            and self._given[self._sources[operand]].keys() <= set(needed)
        )

    def _strategy_us(self, number: int, operation: Operation, strategy: Strategy) -> float:
        us = work_us(operation, self._axis.prices) / self._axis.done[number]
        if strategy.divides_work:
            us /= self._axis.parts
        return us + self._border_us(number, operation, strategy) + self._ahead_us(number, operation, strategy)

    def _ahead_us(self, number: int, operation: Operation, strategy: Strategy) -> float:
        """All-reduces of a weight's product over axes still to be solved, if this one leaves the rows to them."""
        if not self._axis.ahead or not is_product(operation) or self._immovable.isdisjoint(operation.operands):
            return 0.0
        (result, placement), *_ = zip(operation.results, strategy.outputs, strict=True)
        if result is None or isinstance(placement, Partial):
            return 0.0
        layout = self._axis.solved.result(result)
        num_bytes = self._prices.num_bytes(result, layout, placement)
        prices = self._axis.prices
        return sum(
            prices.move_us(RedistributeKind.ALL_REDUCE, axis, 2 * (parts - 1) / parts * num_bytes, num_bytes)
            for axis, parts in self._axis.ahead.items()
        )

    def _border_us(self, number: int, operation: Operation, strategy: Strategy) -> float:
        """Storage of parameters, transfer from other stages, and the reduction of gradients once per step."""
        if operation.port is None:
            return 0.0
        (value,), (placement,) = operation.values, (*strategy.inputs, *strategy.outputs)
        layout = self._layout_at(number, value).with_placement(self._axis.name, placement)
        return self._border.us(operation, value, layout)

    def _layout_at(self, number: int, value: Value) -> Layout:
        """The layout of `value` along the other axes, at a port."""
        solved = self._axis.solved
        return solved.operand(number, 0, value) if self._program[number].operands else solved.result(value)

    def _grouped(self, number: int, placements: Sequence[Placement]) -> dict[Placement, list[int]]:
        """The one-hot of an operation, added up over strategies with equal `placements`."""
        groups: dict[Placement, list[int]] = {}
        for choices, placement in zip(self.one_hots[number], placements, strict=True):
            groups.setdefault(placement, []).extend(choices)
        return groups

    def _matrix(
        self, value: Value, given: Mapping[Placement, list[int]], needed: Mapping[Placement, list[int]]
    ) -> dict[tuple[Placement, Placement], int]:
        entries = {}
        for p in given:
            fixed = value in self._immovable and not isinstance(p, Partial)
            for q in needed:
                if p == q:
                    entries[p, q] = self._ip.variable()
                elif not isinstance(q, Partial) and not (fixed and self._penalty_us is None):
                    entries[p, q] = self._ip.variable(self._penalty_us or 0.0 if fixed else 0.0)
        for p, ones in given.items():
            self._ip.equal([(e, 1) for (src, _), e in entries.items() if src == p] + [(x, -1) for x in ones], 0)
        for q, ones in needed.items():
            self._ip.equal([(e, 1) for (_, dst), e in entries.items() if dst == q] + [(x, -1) for x in ones], 0)
        return entries

    def _price_moves(self) -> None:
        """Charge the redistributions of every value; values with the same source and matrices are charged at once."""
        used: dict[tuple[_Source, tuple[int, ...]], list[Value]] = {}
        for value, uses in self._uses.items():
            used.setdefault((self._sources[value], tuple(map(id, uses))), []).append(value)
        for value, *others in used.values():
            layout, matrices = self._axis.solved.result(value), [use.entries for use in self._uses[value]]
            charge_redistribution(self._ip, self._prices, value, layout, matrices, times=1 + len(others))

    def _price_saved(self) -> None:
        """Charge the activations that the backward reads, once per storage and size of the local shard."""
        root = roots(self._program)
        read: dict[tuple[Value, float], dict[tuple[int, ...], None]] = {}
        for value, uses in self._uses.items():
            if root[value].node.op == "placeholder" or node_meta.is_backward(value.node):
                continue
            for use in uses:
                if self._program[use.reader].call is not None and node_meta.is_backward(self._program[use.reader].node):
                    for num_bytes, entries in self._by_size(value, use).items():
                        read.setdefault((root[value], num_bytes), {})[tuple(entries)] = None
        times = Counter((num_bytes, tuple(members)) for (_, num_bytes), members in read.items())
        for (num_bytes, members), count in times.items():
            saved = self._ip.variable(count * num_bytes * self._axis.prices.saved_us_per_byte)
            for member in members:
                self._ip.no_more_than([saved], member)

    def _by_size(self, value: Value, use: _Use) -> dict[float, list[int]]:
        layout = self._axis.solved.operand(use.reader, use.position, value)
        sizes: dict[float, list[int]] = {}
        for (_, dst), entry in use.entries.items():
            sizes.setdefault(self._prices.num_bytes(value, layout, dst), []).append(entry)
        return sizes

    def _tie_gradients(self) -> None:
        """A parameter's gradient has the parameter's layout; that of a replicated one may also be partial."""
        parameters = {op.port: op.values[0] for op in self._program if op.is_parameter(Border.INPUT)}
        pairs = dict.fromkeys(
            (self._sources[parameters[operation.port]], self._first[number])
            for number, operation in enumerate(self._program)
            if operation.is_parameter(Border.GRADIENT)
        )
        for parameter, gradient in pairs:
            stored = self._given[parameter]
            given = self._grouped(gradient, [_reduced(strategy.inputs[0]) for strategy in self._strategies[gradient]])
            for placement in (*stored, *(p for p in given if p not in stored)):
                ends = [(x, 1.0) for x in stored.get(placement, [])] + [(x, -1.0) for x in given.get(placement, [])]
                self._ip.equal(ends, 0)


def _reduced(placement: Placement) -> Placement:
    return REPLICATE if isinstance(placement, Partial) else placement
