"""Which operations share a choice of strategy: those at the same position in consecutive equal layers.

A deep model repeats one layer, and choosing for each copy separately would make the search time grow with the depth.
So consecutive equal layers share their choices, whose costs are multiplied by the number of layers. The first and the
last stay free, as they have other neighbours. Those between alternate, and only every other one shares: a layer may
return its result with the axes swapped, as the next one takes it (`fxpar.layouts.weights`). Sharing only restricts the
choices; it does not change what a choice costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

from fxpar.costs.dataflow import Border, Operation, Value
from fxpar.graph.repeats import Repeat, find_repeats
from fxpar.ir import node_meta
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.rules.rule import Strategy


def share_layers(
    program: Sequence[Operation],
    strategies: Sequence[Sequence[Strategy]],
    immovable: Set[Value],
    solved: SolvedAxes,
    done: Sequence[int],
) -> tuple[int, ...]:
    """For each operation, the number of the first one that shares its choice, which mostly is its own.

    Operations that share have the same strategies in the same order, at the same price. `done[i]` ranks share
    operation i's work along other axes; `solved` has the layouts of values along those.
    """
    labels = _labels(program, strategies, immovable, solved, done)
    found = list(range(len(program)))
    calls = [number for number, operation in enumerate(program) if operation.call is not None]
    for repeat in find_repeats([labels[number] for number in calls], [0] * (len(calls) + 1), smallest=1):
        _share(found, calls, repeat)
    _share_ports(found, program, labels)
    return tuple(found)


def _share(found: list[int], calls: Sequence[int], repeat: Repeat) -> None:
    """Let the inner pieces of a repeat share with the second or the third one, alternately."""
    for piece in range(3, repeat.count - 1):
        first, start = (repeat.start + repeat.period * at for at in (2 - piece % 2, piece))
        for item in range(repeat.period):
            found[calls[start + item]] = calls[first + item]


def _share_ports(found: list[int], program: Sequence[Operation], labels: Sequence[int]) -> None:
    """Let parameters share if all their readers do, and their gradients with them."""
    readers: dict[Value, list[tuple[int, int]]] = {}
    for number, operation in enumerate(program):
        if operation.call is not None:
            for position, value in enumerate(operation.operands):
                readers.setdefault(value, []).append((found[number], position))
    parameters = {op.port: number for number, op in enumerate(program) if op.is_parameter(Border.INPUT)}
    first: dict[Hashable, int] = {}
    for number, operation in enumerate(program):
        if operation.is_parameter(Border.INPUT):
            key = (labels[number], tuple(readers.get(operation.values[0], ())))
            found[number] = first.setdefault(key, number)
        elif operation.is_parameter(Border.GRADIENT) and operation.port in parameters:
            found[number] = first.setdefault((labels[number], found[parameters[operation.port]]), number)


def _labels(
    program: Sequence[Operation],
    strategies: Sequence[Sequence[Strategy]],
    immovable: Set[Value],
    solved: SolvedAxes,
    done: Sequence[int],
) -> list[int]:
    """A label for each operation; equal labels mean equal prices and equal constraints.

    It includes the strategies of the ops that make the operands: a layer with a hint differs from the others.
    """
    numbers: dict[Hashable, int] = {}
    given: dict[Value, int] = {}
    labels = []
    for number, operation in enumerate(program):
        choices = numbers.setdefault(tuple(strategies[number]), len(numbers))
        labels.append(
            numbers.setdefault(
                (
                    operation.signature,
                    operation.border,
                    node_meta.is_backward(operation.node),
                    choices,
                    done[number],
                    tuple((given[value], value in immovable) for value in operation.operands),
                    tuple(solved.operand(number, i, value) for i, value in enumerate(operation.operands)),
                    tuple(solved.result(value) for value in operation.results if value is not None),
                ),
                len(numbers),
            )
        )
        given.update((result, choices) for result in operation.results if result is not None)
    return labels
