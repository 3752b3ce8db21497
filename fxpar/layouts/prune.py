"""Remove strategies that no solution can contain, so that the integer program stays small."""

from __future__ import annotations

from collections.abc import Sequence, Set

from fxpar.costs.dataflow import Operation, Value
from fxpar.ir.layout import Partial, Placement
from fxpar.rules.rule import Strategy


def prune(
    program: Sequence[Operation], strategies: Sequence[Sequence[Strategy]], immovable: Set[Value]
) -> list[tuple[Strategy, ...]]:
    """The strategies of each operation whose operands are all available and whose results can all be used; maybe none.

    No redistribution makes a value partial, so a partial operand must be made partial by its producer. Values in
    `immovable` are not redistributed, but where they are partial they may be reduced.
    """
    kept = [tuple(found) for found in strategies]
    while True:
        given: dict[Value, set[Placement]] = {}
        needed: dict[Value, set[Placement]] = {}
        before = sum(map(len, kept))
        for number, operation in enumerate(program):
            kept[number] = tuple(s for s in kept[number] if _can_be_had(operation, s, given, immovable))
            for position, result in enumerate(operation.results):
                if result is not None:
                    given[result] = {strategy.outputs[position] for strategy in kept[number]}
        for number, operation in reversed(list(enumerate(program))):
            kept[number] = tuple(s for s in kept[number] if _can_be_used(operation, s, needed, immovable))
            for position, value in enumerate(operation.operands):
                wanted = {strategy.inputs[position] for strategy in kept[number]}
                needed[value] = needed[value] & wanted if value in needed else wanted
        if sum(map(len, kept)) == before:
            return kept


def _can_be_had(
    operation: Operation, strategy: Strategy, given: dict[Value, set[Placement]], immovable: Set[Value]
) -> bool:
    return all(
        placement in given[value]
        or not (_is_partial(placement) or (value in immovable and not any(map(_is_partial, given[value]))))
        for value, placement in zip(operation.operands, strategy.inputs, strict=True)
    )


def _can_be_used(
    operation: Operation, strategy: Strategy, needed: dict[Value, set[Placement]], immovable: Set[Value]
) -> bool:
    return all(
        placement in needed[value] or _is_partial(placement)
        for value, placement in zip(operation.results, strategy.outputs, strict=True)
        if value is not None and value in immovable and value in needed
    )


def _is_partial(placement: Placement) -> bool:
    return isinstance(placement, Partial)
