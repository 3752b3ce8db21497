"""The layouts of values along the mesh axes that are solved already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from fxpar.costs.dataflow import Operation, Value
from fxpar.ir.layout import Layout, Partial, Placement, Replicate
from fxpar.rules.rule import Strategy


@dataclass(frozen=True, slots=True)
class SolvedAxes:
    """The layout of every result, and of every operand where it is used, along the solved axes.

    Operands are keyed by the number of the operation and their position. Values without an entry are replicated.
    """

    given: Mapping[Value, Layout] = field(default_factory=dict)
    needed: Mapping[tuple[int, int], Layout] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Sequence[Operation], chosen: Mapping[str, Sequence[Strategy]]) -> SolvedAxes:
        """The layouts of all values if the operations of `program` have the `chosen` strategies, by axis."""
        solved = cls()
        for axis, strategies in chosen.items():
            solved = solved.along(axis, program, strategies)
        return solved

    def along(self, axis: str, program: Sequence[Operation], chosen: Sequence[Strategy]) -> SolvedAxes:
        """The same with one more axis, along which the operations of `program` have the `chosen` strategies."""
        given: dict[Value, Layout] = {}
        needed: dict[tuple[int, int], Layout] = {}
        for number, (operation, strategy) in enumerate(zip(program, chosen, strict=True)):
            for position, (value, placement) in enumerate(zip(operation.operands, strategy.inputs, strict=True)):
                needed[number, position] = self.operand(number, position, value).with_placement(axis, placement)
            for result, placement in zip(operation.results, strategy.outputs, strict=True):
                if result is not None:
                    given[result] = self.result(result).with_placement(axis, placement)
        return SolvedAxes(given, needed)

    def result(self, value: Value) -> Layout:
        """The layout of `value` where it is made."""
        return self.given.get(value) or _replicated(tuple(value.tensor.shape))

    def operand(self, operation: int, position: int, value: Value) -> Layout:
        """The layout in which operand `position` of operation number `operation` is needed."""
        return self.needed.get((operation, position)) or _replicated(tuple(value.tensor.shape))


@cache
def _replicated(shape: tuple[int, ...]) -> Layout:
    """Cached, since every use of every value asks for it."""
    return Layout(shape)


def fits(layout: Layout, placement: Placement) -> bool:
    """Whether one more axis can have `placement`: one axis per digit, and partial sums and maxima do not mix."""
    if isinstance(placement, Partial):
        return all(placement == other for _, other in layout.axes if isinstance(other, Partial))
    return isinstance(placement, Replicate) or layout.accepts(placement)
