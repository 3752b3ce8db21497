"""Which operations are laid out alike: those at the same place of layers that stand in a row.

A deep model repeats one layer, and to choose for each copy anew would make the search as much slower as the model is
deep. So the layers of a row share their choices, whose costs count as often. The first and the last stay free, as
they have other neighbours, and those between take turns, every other one alike: a layer may give its result with the
axes swapped, as the next one takes it (`fxpar.layouts.weights`). Sharing only narrows what can be chosen, and what
is chosen costs what it did.
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
    """For each operation the number of the first one that is laid out like it, which mostly is its own.

    Operations that are alike have the same strategies in the same order, at the same price. `done[i]` is how many
    ranks share operation i's work along other axes, while values are sharded along those as `solved` says.
    """
    labels = _labels(program, strategies, immovable, solved, done)
    found = list(range(len(program)))
    calls = [number for number, operation in enumerate(program) if operation.call is not None]
    for repeat in find_repeats([labels[number] for number in calls], [0] * (len(calls) + 1), smallest=1):
        _share(found, calls, repeat)
    _share_ports(found, program, labels)
    return tuple(found)


def _share(found: list[int], calls: Sequence[int], repeat: Repeat) -> None:
    """Let the inner pieces of a repeat be as the second or the third one, by turns."""
    for piece in range(3, repeat.count - 1):
        first, start = (repeat.start + repeat.period * at for at in (2 - piece % 2, piece))
        for item in range(repeat.period):
            found[calls[start + item]] = calls[first + item]


def _share_ports(found: list[int], program: Sequence[Operation], labels: Sequence[int]) -> None:
    """Let parameters be alike whose readers are, and their gradients with them."""
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
    """A number for all that an operation's price and its part in the program depend on; equal for equal ones.

    Where an operand comes from counts, too, by what can be given: a layer with a hint is not like the others.
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
