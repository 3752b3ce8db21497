"""The rule of an op whose sharding einsum notation can express."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from fxpar.ir.layout import REPLICATE, Partial, Placement, Shard
from fxpar.rules.call import tensor_slots
from fxpar.rules.einsum import Einsum, einsum
from fxpar.rules.rule import LocalOp, OpCall, Operand, Strategy


def call_as_is(local: LocalOp) -> fx.Node:
    """The op itself on the local operands: right if no argument refers to a sharded dim."""
    return local.emit(local.call.target, *local.args, **local.kwargs)


@dataclass(frozen=True, slots=True)
class EinsumRule:
    """A rule by einsum notation.

    `notation` is the text (one operand per tensor slot of the op's schema, filled or not), or a function that
    returns it for a call: as text, as an `Einsum` of the operands that are there, or None if the call cannot be
    sharded. `linear_in` says which operands may be partial sums and so make partial results: each of them alone,
    all of them together, those at the given slots together (-1 is the last), or none, for ops whose results are zero.
    `moves_only`: the op copies values and computes nothing, so that partial maxima pass too. `reduction` is that of a
    result that lacks a sharded letter.
    """

    notation: str | Callable[[OpCall], str | Einsum | None]
    linear_in: Literal["each", "together", "none"] | tuple[int, ...] = ()
    moves_only: bool = False
    reduction: Literal["sum", "max"] = "sum"
    emit_local: Callable[[LocalOp], fx.Node] = call_as_is

    def einsum_of(self, call: OpCall) -> Einsum | None:
        """The notation of this call, parsed."""
        written = self.notation if isinstance(self.notation, str) else self.notation(call)
        if isinstance(written, str):
            return einsum(written, tuple(tensor_slots(call)), tuple(map(len, call.inputs)))
        return written

    def extend(self, call: OpCall, operand: Operand, shard: Shard) -> Strategy | None:
        """See `Rule.extend`."""
        notation = self.einsum_of(call)
        return None if notation is None else notation.strategy(call, operand, shard, self.reduction)

    def linear(self, call: OpCall) -> Sequence[Strategy]:
        """See `Rule.linear`."""
        reductions = [Partial("sum"), Partial("max")] if self.moves_only else [Partial("sum")]
        operand_sets = self._partial_operands(call)
        return [_partial_strategy(call, operands, r) for operands in operand_sets for r in reductions]

    def _partial_operands(self, call: OpCall) -> list[set[int]]:
        """Sets of operands that may be partial at once; none if a number is in a slot, as all ranks would add it."""
        slots = tensor_slots(call)
        if self.linear_in == "each":
            return [{operand} for operand in range(len(call.inputs))]
        if self.linear_in == "none":
            return [set()]
        wanted = range(len(slots)) if self.linear_in == "together" else self.linear_in
        if not wanted or not all(slots[slot] for slot in wanted):
            return []
        return [{sum(slots[:slot]) for slot in wanted}]

    def emit(self, local: LocalOp) -> fx.Node:
        """See `Rule.emit`."""
        return self.emit_local(local)


def _partial_strategy(call: OpCall, operands: set[int], reduction: Partial) -> Strategy:
    inputs: list[Placement] = [reduction if i in operands else REPLICATE for i in range(len(call.inputs))]
    outputs: list[Placement] = [REPLICATE if shape is None else reduction for shape in call.outputs]
    return Strategy(tuple(inputs), tuple(outputs), divides_work=False)
