"""Choose one strategy per operation, all at once: layouts as an integer program.

Each operation is a one-hot vector over its strategies. Each use of a value is a matrix whose entry [p, q] is 1 if the value
is given as placement p and needed as q; its row and column sums are the one-hots of producer and consumer, added up
over strategies that agree on this value. In this form the relaxation is nearly always whole, so that the
matrices may be continuous. A move that several consumers need is one more variable that bounds all their entries: it is paid once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from fxpar import annotate
from fxpar.layout import REPLICATE, Layout, Partial, Placement
from fxpar.layouts.candidates import Beside
from fxpar.layouts.dataflow import Border, Operation, Value, roots
from fxpar.layouts.integer_program import IntegerProgram
from fxpar.layouts.move_prices import MovePrices
from fxpar.layouts.work import work_us
from fxpar.passes.moves import StepKind
from fxpar.planner.prices import Prices
from fxpar.rules.rule import Strategy
from fxpar.stage import PortKind

_TIE_US = 1e-4
"""What each place down the list of an operation's strategies costs, so that among equals every rank picks the same."""

_WHOLE = {StepKind.REDUCE_SCATTER: StepKind.ALL_REDUCE, StepKind.ALL_TO_ALL: StepKind.ALL_GATHER}
"""The move that makes a value whole, after which the sharded form is a mere slice."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The mesh axis to choose for: its size, what it costs, and what the axes before it have settled.

    `done[i]` is how many ranks share operation i's work along those axes.
    """

    name: str
    parts: int
    prices: Prices
    microbatches: int
    beside: Beside
    done: Sequence[int]


class _Move(NamedTuple):
    """A change of placement that several uses of a value can share."""

    kind: StepKind
    dst: Placement
    us: float


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

    Values in `immovable` are used where they lie; with `penalty_us`, moving them is merely that dear.
    """
    chooser = _Chooser(program, strategies, axis, immovable, penalty_us)
    solution = chooser.formulate().solve()
    if solution is None:
        return None
    return [max(range(len(x)), key=lambda k: solution[x[k]]) for x in chooser.one_hots]


class _Chooser:
    """Writes the integer program down."""

    def __init__(
        self,
        program: Sequence[Operation],
        strategies: Sequence[Sequence[Strategy]],
        axis: Axis,
        immovable: Set[Value],
        penalty_us: float | None,
    ) -> None:
        self._program, self._strategies, self._axis = program, strategies, axis
        self._immovable, self._penalty_us = immovable, penalty_us
        self._ip = IntegerProgram()
        self._prices = MovePrices(axis.name, axis.parts, axis.prices)
        self.one_hots: list[list[int]] = []

    def formulate(self) -> IntegerProgram:
        self.one_hots = [self._one_hot(number) for number in range(len(self._program))]
        uses = self._uses()
        for value, of_value in uses.items():
            self._price_moves(value, of_value)
        self._price_saved(uses)
        self._tie_gradients()
        return self._ip

    def _one_hot(self, number: int) -> list[int]:
        operation = self._program[number]
        whole_us = work_us(operation, self._axis.prices) / self._axis.done[number]
        chosen = []
        for place, strategy in enumerate(self._strategies[number]):
            us = whole_us / self._axis.parts if strategy.divides_work else whole_us
            us += self._border_us(number, operation, strategy) + place * _TIE_US
            chosen.append(self._ip.variable(us, integral=True))
        self._ip.equal([(x, 1) for x in chosen], 1)
        return chosen

    def _border_us(self, number: int, operation: Operation, strategy: Strategy) -> float:
        """Storage of parameters, transfer from other stages, and the reduction of gradients once per step."""
        if operation.port is None:
            return 0.0
        prices, kind = self._axis.prices, operation.port.kind
        (value,), (placement,) = operation.values, (*strategy.inputs, *strategy.outputs)
        layout = self._layout(number, value)
        if operation.border is Border.INPUT and kind is PortKind.PARAMETER:
            return prices.stored_us_per_byte * self._prices.num_bytes(value, layout, placement)
        if operation.border in (Border.INPUT, Border.TANGENT) and kind is PortKind.EDGE:
            return self._prices.num_bytes(value, layout, placement) / prices.edge_bytes_per_us
        if isinstance(placement, Partial):
            return self._prices.move(value, layout, placement, REPLICATE)[1] / self._axis.microbatches
        return 0.0

    def _layout(self, number: int, value: Value) -> Layout:
        """Where `value` lies along the other axes, at a port."""
        beside = self._axis.beside
        return beside.operand(number, 0, value) if self._program[number].operands else beside.result(value)

    def _uses(self) -> dict[Value, list[_Use]]:
        """Every use of every value, tied to the one-hots at both its ends."""
        given: dict[Value, dict[Placement, list[int]]] = {}
        uses: dict[Value, list[_Use]] = {}
        for number, operation in enumerate(self._program):
            for position, value in enumerate(operation.operands):
                needed = self._grouped(number, [strategy.inputs[position] for strategy in self._strategies[number]])
                uses.setdefault(value, []).append(_Use(number, position, self._matrix(value, given[value], needed)))
            for position, result in enumerate(operation.results):
                if result is not None:
                    given[result] = self._grouped(number, [strategy.outputs[position] for strategy in self._strategies[number]])
        return uses

    def _grouped(self, number: int, placements: Sequence[Placement]) -> dict[Placement, list[int]]:
        groups: dict[Placement, list[int]] = {}
        for x, placement in zip(self.one_hots[number], placements, strict=True):
            groups.setdefault(placement, []).append(x)
        return groups

    def _matrix(
        self, value: Value, given: Mapping[Placement, list[int]], needed: Mapping[Placement, list[int]]
    ) -> dict[tuple[Placement, Placement], int]:
        fixed = value in self._immovable
        entries = {}
        for p in given:
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

    def _price_moves(self, value: Value, uses: Sequence[_Use]) -> None:
        """Charge each move of `value` once, however many need it; where it is made whole anyway, shards are mere slices."""
        layout = self._axis.beside.result(value)
        groups: dict[_Move, list[list[int]]] = {}
        for use in uses:
            by_move: dict[_Move, list[int]] = {}
            for (src, dst), entry in use.entries.items():
                if src != dst:
                    kind, us = self._prices.move(value, layout, src, dst)
                    by_move.setdefault(_Move(kind, dst, us), []).append(entry)
            for move, entries in by_move.items():
                groups.setdefault(move, []).append(entries)
        made_whole: dict[StepKind, int] = {}
        for move in sorted(groups, key=lambda move: move.dst != REPLICATE):
            alternatives = [made_whole[_WHOLE[move.kind]]] if _WHOLE.get(move.kind) in made_whole else []
            helps_others = any(_WHOLE.get(other.kind) is move.kind for other in groups)
            if move.kind is StepKind.SLICE or (len(groups[move]) == 1 and not alternatives and not helps_others):
                for entry in (entry for entries in groups[move] for entry in entries):
                    self._ip.add_cost(entry, move.us)
                continue
            made = self._ip.variable(move.us)
            if helps_others:
                made_whole[move.kind] = made
            for entries in groups[move]:
                self._ip.at_least([(x, 1) for x in (made, *alternatives)] + [(e, -1) for e in entries], 0)

    def _price_saved(self, uses: Mapping[Value, Sequence[_Use]]) -> None:
        """Charge what the backward reads of the forward, once per storage and size of the piece that is read."""
        root = roots(self._program)
        read: dict[tuple[Value, float], list[list[int]]] = {}
        for value, of_value in uses.items():
            if root[value].node.op == "placeholder" or annotate.is_backward(value.node):
                continue
            for use in of_value:
                if self._program[use.reader].call is not None and annotate.is_backward(self._program[use.reader].node):
                    for num_bytes, entries in self._by_size(value, use).items():
                        read.setdefault((root[value], num_bytes), []).append(entries)
        for (_, num_bytes), members in read.items():
            saved = self._ip.variable(num_bytes * self._axis.prices.saved_us_per_byte)
            for entries in members:
                self._ip.at_least([(saved, 1)] + [(e, -1) for e in entries], 0)

    def _by_size(self, value: Value, use: _Use) -> dict[float, list[int]]:
        layout = self._axis.beside.operand(use.reader, use.position, value)
        sizes: dict[float, list[int]] = {}
        for (_, dst), entry in use.entries.items():
            sizes.setdefault(self._prices.num_bytes(value, layout, dst), []).append(entry)
        return sizes

    def _tie_gradients(self) -> None:
        """A parameter's gradient lies as the parameter does; of a replicated one it may be left to be summed."""
        numbers = {
            operation.port: number
            for number, operation in enumerate(self._program)
            if operation.border is Border.INPUT and operation.port is not None
        }
        for number, operation in enumerate(self._program):
            if operation.border is Border.GRADIENT and operation.port is not None and operation.port.kind is PortKind.PARAMETER:
                parameter = numbers[operation.port]
                stored = self._grouped(parameter, [strategy.outputs[0] for strategy in self._strategies[parameter]])
                given = self._grouped(
                    number, [_reduced(strategy.inputs[0]) for strategy in self._strategies[number]]
                )
                for placement in (*stored, *(p for p in given if p not in stored)):
                    ends = [(x, 1.0) for x in stored.get(placement, [])] + [(x, -1.0) for x in given.get(placement, [])]
                    self._ip.equal(ends, 0)


def _reduced(placement: Placement) -> Placement:
    return REPLICATE if isinstance(placement, Partial) else placement
