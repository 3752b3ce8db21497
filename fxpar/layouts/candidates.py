"""Which strategies each operation has on one mesh axis: a fixpoint of the sharding rules over a whole graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set

from torch import Tensor, fx

from fxpar.costs.dataflow import Border, Operation, Value
from fxpar.ir.dtensor import is_expressible
from fxpar.ir.layout import REPLICATE, Layout, Partial, Placement, Shard
from fxpar.ir.stage import PortKind
from fxpar.layouts.pins import Pin
from fxpar.layouts.solved_axes import SolvedAxes, fits
from fxpar.rules import rule_for
from fxpar.rules.einsum import leaves_no_rank_empty
from fxpar.rules.rule import OpCall, Operand, Rule, Strategy
from fxpar.rules.strategies import candidate_shards, replicated
from fxpar.world.mesh import STAGE_AXES


class _Rules:
    """Asks the sharding rules and caches their answers by the signature of the op: identical layers ask the same."""

    def __init__(self) -> None:
        self._extended: dict[tuple[str, Operand, Shard], Strategy | None] = {}
        self._linear: dict[str, Sequence[Strategy]] = {}

    def extend(self, operation: Operation, operand: Operand, shard: Shard) -> Strategy | None:
        key = (operation.signature, operand, shard)
        if key not in self._extended:
            rule, call = _rule(operation)
            self._extended[key] = rule.extend(call, operand, shard) if rule else None
        return self._extended[key]

    def linear(self, operation: Operation) -> Sequence[Strategy]:
        if operation.signature not in self._linear:
            rule, call = _rule(operation)
            self._linear[operation.signature] = rule.linear(call) if rule else ()
        return self._linear[operation.signature]


def _rule(operation: Operation) -> tuple[Rule | None, OpCall]:
    assert operation.call is not None, f"{operation} is no op"
    return rule_for(operation.call.target), operation.call


class Candidates:
    """The strategies of every operation of `program` along one axis of `parts` ranks.

    Every dim of every value that divides evenly is tried; a rule that accepts a shard of one value returns shards of
    the op's other values, until nothing new is found. Uneven shards come from pins, and from dims of the inputs
    `ragged` that `parts` does not divide. `frozen` ops are replicated; `pins` are keyed by placeholder or hint op.
    """

    def __init__(
        self,
        program: Sequence[Operation],
        axis: str,
        parts: int,
        pins: Mapping[fx.Node, Pin],
        frozen: set[fx.Node],
        solved: SolvedAxes,
        ragged: Set[fx.Node] = frozenset(),
    ) -> None:
        self._program, self._axis, self._parts = program, axis, parts
        self._pins, self._frozen, self._solved, self._ragged = pins, frozen, solved, ragged
        self._rules = _Rules()
        self._shards: dict[Value, dict[Shard, None]] = {}
        self._pending: deque[tuple[Value, Shard]] = deque()
        self._readers: dict[Value, list[tuple[int, Operand]]] = {}
        self._twins = _twins(program)
        self._layouts = [self._solved_layouts(number, operation) for number, operation in enumerate(program)]
        self._strategies: list[dict[Strategy, None]] = [{} for _ in program]

    def find(self) -> list[tuple[Strategy, ...]]:
        """The strategies of each operation, each list in a fixed order; empty where a pin cannot be met."""
        for number, operation in enumerate(self._program):
            if operation.call is not None:
                self._open(number, operation)
        for value in dict.fromkeys(value for operation in self._program for value in operation.values):
            for shard in self._seeds(value):
                self._note(value, shard)
        while self._pending:
            value, shard = self._pending.popleft()
            for number, operand in self._readers.get(value, ()):
                strategy = self._rules.extend(self._program[number], operand, shard)
                if strategy is not None:
                    self._add(number, strategy)
        used = self._used()
        for number, operation in enumerate(self._program):
            if operation.call is None:
                self._strategies[number] = dict.fromkeys(self._at_border(number, operation, used))
        return [tuple(strategies) for strategies in self._strategies]

    def _open(self, number: int, operation: Operation) -> None:
        assert operation.call is not None, f"{operation} is no op"
        self._add(number, replicated(operation.call))
        for strategy in self._rules.linear(operation):
            self._add(number, strategy)  # also for frozen ops: a constant of zeros may be a partial sum
        if operation.node in self._frozen:
            return
        for position, value in enumerate(operation.operands):
            self._readers.setdefault(value, []).append((number, Operand("input", position)))
        for position, result in enumerate(operation.results):
            if result is not None:
                self._readers.setdefault(result, []).append((number, Operand("output", position)))

    def _seeds(self, value: Value) -> list[Shard]:
        pin = self._pins.get(value.node)
        if pin is not None:
            seed = pin.seed(self._axis, self._parts)
            return [seed] if isinstance(seed, Shard) and seed.parts <= value.tensor.shape[seed.dim] else []
        layout = self._solved.result(value)
        shards = candidate_shards(layout.shape, self._parts)
        for dim, size in enumerate(layout.shape):
            nested = [Shard(dim, self._parts, outer) for outer in _ends_of_axes(layout, dim)]
            shards += [shard for shard in nested if shard.fits(size)]
            if (
                value.node in self._ragged
                and size % self._parts
                and leaves_no_rank_empty(size, Shard(dim, self._parts))
            ):
                shards.append(Shard(dim, self._parts))
        return shards

    def _note(self, value: Value, shard: Shard) -> None:
        for same in (value, *self._twins.get(value, ())):
            found = self._shards.setdefault(same, {})
            if shard not in found:
                found[shard] = None
                self._pending.append((same, shard))

    def _add(self, number: int, strategy: Strategy) -> None:
        operation = self._program[number]
        if strategy in self._strategies[number] or not self._combines(number, operation, strategy):
            return
        self._strategies[number][strategy] = None
        for value, placement in _placed(operation, strategy):
            if isinstance(placement, Shard):
                self._note(value, placement)

    def _combines(self, number: int, operation: Operation, strategy: Strategy) -> bool:
        """Whether the strategy is compatible with the layouts along other axes, and with a hint op's pin."""
        pin = self._pins.get(operation.node)
        allowed = pin is None or all(pin.allows(self._axis, placement) for placement in strategy.outputs)
        return allowed and self._fits(number, operation, strategy)

    def _fits(self, number: int, operation: Operation, strategy: Strategy) -> bool:
        placements = [placement for _, placement in _placed(operation, strategy)]
        return all(map(fits, self._layouts[number], placements))

    def _solved_layouts(self, number: int, operation: Operation) -> list[Layout]:
        """The layouts of an operation's values along other axes."""
        layouts = [self._solved.operand(number, i, value) for i, value in enumerate(operation.operands)]
        return layouts + [self._solved.result(value) for value in operation.results if value is not None]

    def _used(self) -> dict[Value, dict[Shard, None]]:
        """The shards in which ops return or take each value or one of its twins."""
        used: dict[Value, dict[Shard, None]] = {}
        for operation, strategies in zip(self._program, self._strategies, strict=True):
            for strategy in strategies:
                for value, placement in _placed(operation, strategy):
                    if isinstance(placement, Shard):
                        for same in (value, *self._twins.get(value, ())):
                            used.setdefault(same, {})[placement] = None
        return used

    def _at_border(
        self, number: int, operation: Operation, used: Mapping[Value, Mapping[Shard, None]]
    ) -> list[Strategy]:
        """A port's strategies: every placement in which an op returns or takes its value, if its kind allows it."""
        (value,) = operation.values
        allowed: list[Placement] = [REPLICATE]
        if _may_be_sharded(operation, value.tensor):
            allowed += used.get(value, {})
        pin = self._pins.get(operation.node)
        if pin is not None:
            if value not in self._readers:
                allowed += self._seeds(value)  # what no op reads may be sharded as it is pinned
            allowed = [placement for placement in allowed if pin.allows(self._axis, placement)]
        if operation.is_parameter(Border.GRADIENT):
            allowed.append(Partial("sum"))
        strategies = [Strategy((p,), ()) if operation.operands else Strategy((), (p,)) for p in allowed]
        fitting = [strategy for strategy in strategies if self._fits(number, operation, strategy)]
        if operation.is_parameter(Border.INPUT):
            solved = self._solved.result(value)
            return [s for s in fitting if is_expressible(solved.with_placement(self._axis, s.outputs[0]), STAGE_AXES)]
        return fitting


def _ends_of_axes(layout: Layout, dim: int) -> list[int]:
    """The values of `Shard.outer` at which a digit may start in `dim`: the ends of the digits of other axes."""
    ends, position = [], 1
    for digit in layout.digits(dim):
        position *= digit.size
        if digit.axis is not None:
            ends.append(position)
    return ends


def _placed(operation: Operation, strategy: Strategy) -> list[tuple[Value, Placement]]:
    pairs = list(zip(operation.operands, strategy.inputs, strict=True))
    for result, placement in zip(operation.results, strategy.outputs, strict=True):
        if result is not None:
            pairs.append((result, placement))
    return pairs


def _may_be_sharded(operation: Operation, tensor: Tensor) -> bool:
    """Whether a port may be sharded: parameters, edges and results that are not scalars."""
    kinds = (PortKind.PARAMETER, PortKind.EDGE, PortKind.RESULT)
    return operation.port is not None and operation.port.kind in kinds and tensor.dim() > 0


def _twins(program: Sequence[Operation]) -> dict[Value, list[Value]]:
    """Values that should have the same layout, though no op relates them: each parameter and its gradient."""
    parameters = {op.port: op.values[0] for op in program if op.border is Border.INPUT}
    found: dict[Value, list[Value]] = {}
    for operation in program:
        if operation.border is Border.GRADIENT and operation.port in parameters:
            parameter, (gradient,) = parameters[operation.port], operation.values
            found.setdefault(parameter, []).append(gradient)
            found.setdefault(gradient, []).append(parameter)
    return found
