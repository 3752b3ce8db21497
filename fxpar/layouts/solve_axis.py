"""Choose layouts along one mesh axis: the strategies of all operations together, under hints, with weights sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from fxpar.costs.dataflow import Border, Operation, Value, derived_from, small_constants
from fxpar.errors import InfeasibleLayoutError
from fxpar.ir.layout import Partial, Placement, Shard
from fxpar.ir.stage import Port
from fxpar.layouts.candidates import Candidates
from fxpar.layouts.choose import Axis, choose
from fxpar.layouts.pins import Pin
from fxpar.layouts.prune import prune
from fxpar.layouts.weights import Wanted
from fxpar.rules.rule import Strategy

_PENALTY_US = 1e9
"""The penalty for redistributing a value that must not be, to find those that make a problem infeasible."""


def solve_axis(
    program: Sequence[Operation], pins: Mapping[fx.Node, Pin], wanted: dict[fx.Node, Wanted], axis: Axis
) -> list[Strategy]:
    """The cheapest strategies along `axis`, under the pins and with the weights of products sharded as `wanted`.

    Where what is wanted conflicts with itself or with the pins, some of it is relaxed, and `wanted` is updated.

    Raises:
        InfeasibleLayoutError: the pins cannot all be met.
    """
    return _AxisSolver(program, pins, wanted, axis).solve()


class _AxisSolver:
    """The strategies that the rules admit, and the constraints on them."""

    def __init__(
        self, program: Sequence[Operation], pins: Mapping[fx.Node, Pin], wanted: dict[fx.Node, Wanted], axis: Axis
    ) -> None:
        self._program, self._axis, self._wanted = program, axis, wanted
        self._pins = {node: pin for node, pin in pins.items() if pin.settles(axis.name)}
        frozen = small_constants(program) - self._pins.keys()
        self._admitted = Candidates(
            program, axis.name, axis.parts, self._pins, frozen, axis.solved, ragged=wanted.keys()
        ).find()

    def solve(self) -> list[Strategy]:
        for operation, found in zip(self._program, self._admitted, strict=True):
            if not found:
                raise InfeasibleLayoutError(_no_strategy(operation, self._pins[operation.node], self._axis))
        while True:
            strategies, fixed = self._narrowed()
            immovable = derived_from(self._program, fixed)
            possible = prune(self._program, strategies, immovable.keys())
            chosen = choose(self._program, possible, self._axis, immovable.keys()) if all(possible) else None
            if chosen is not None:
                return [found[k] for found, k in zip(possible, chosen, strict=True)]
            self._relax(strategies, immovable)

    def _narrowed(self) -> tuple[list[Sequence[Strategy]], set[fx.Node]]:
        """The strategies of each operation, and the weights to be neither gathered nor sliced: those always sharded."""
        fixed = {node for node, pin in self._pins.items() if pin.fixed_at_use}
        strategies: list[Sequence[Strategy]] = list(self._admitted)
        for number, operation in enumerate(self._program):
            if operation.node in self._wanted:
                wanted = self._wanted[operation.node]
                solved = self._axis.solved.result(Value(operation.node))
                strategies[number] = wanted.among(self._admitted[number], solved)
                if wanted is not Wanted.ANY and all(isinstance(s.outputs[0], Shard) for s in strategies[number]):
                    fixed.add(operation.node)
        return strategies, fixed

    def _relax(self, strategies: Sequence[Sequence[Strategy]], immovable: Mapping[Value, Sequence[Port]]) -> None:
        """Relax what is wanted of the weights that would have to be redistributed, or of all if there are none.

        Raises:
            InfeasibleLayoutError: nothing is left to relax.
        """
        moved = _moved(self._program, strategies, self._axis, immovable)
        ports = {port for value, _, _ in moved or () for port in immovable[value]}
        left = [node for node, wanted in self._wanted.items() if wanted is not Wanted.ANY]
        named = {op.node for op in self._program if op.border is Border.INPUT and op.port in ports}
        if not left:
            raise InfeasibleLayoutError(_conflict(moved, self._axis, immovable))
        for node in [node for node in left if node in named] or left:
            self._wanted[node] = Wanted(self._wanted[node] + 1)


class _Moved(NamedTuple):
    """A value that a solution needs in another placement than the one in which it is made."""

    value: Value
    given: Placement
    use: str


def _moved(
    program: Sequence[Operation],
    strategies: Sequence[Sequence[Strategy]],
    axis: Axis,
    immovable: Mapping[Value, Sequence[Port]],
) -> list[_Moved] | None:
    """The immovable values that would have to be redistributed for a solution to exist; None if that does not help."""
    chosen = choose(program, strategies, axis, immovable.keys(), penalty_us=_PENALTY_US)
    if chosen is None:
        return None
    picked = [found[k] for found, k in zip(strategies, chosen, strict=True)]
    given = {
        value: placement
        for operation, strategy in zip(program, picked, strict=True)
        for value, placement in zip(operation.results, strategy.outputs, strict=True)
        if value is not None
    }
    return [
        _Moved(value, given[value], f"{placement} by {operation}")
        for operation, strategy in zip(program, picked, strict=True)
        for value, placement in zip(operation.operands, strategy.inputs, strict=True)
        if value in immovable and given[value] != placement and not isinstance(given[value], Partial)
    ]


def _no_strategy(operation: Operation, pin: Pin, axis: Axis) -> str:
    shape = tuple(operation.values[-1].tensor.shape)
    wanted = f"shard dim {pin.shards[axis.name][0]}" if axis.name in pin.shards else "replicate"
    return (
        f"{operation} has shape {shape} and is pinned to {wanted} over {axis.name} ({axis.parts} ranks), "
        "which none of its uses can take; hint another dim, or leave the hint out"
    )


def _conflict(moved: Sequence[_Moved] | None, axis: Axis, immovable: Mapping[Value, Sequence[Port]]) -> str:
    """The message that names the hinted weights that would have to be redistributed for a solution to exist."""
    if moved is None:
        return f"no layouts over {axis.name} ({axis.parts} ranks) meet what the stage's neighbours and hints ask for"
    listed = [
        f"{' and '.join(map(str, immovable[v]))}: placed as {given}, but needed as {use}" for v, given, use in moved
    ]
    return (
        f"the hints conflict over {axis.name} ({axis.parts} ranks). A hinted weight is used as it is sharded, but "
        "these would have to be gathered or sliced:\n  "
        + "\n  ".join(listed)
        + "\nchange or remove the hint of one of them"
    )
