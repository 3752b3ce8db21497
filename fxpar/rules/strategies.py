"""The strategies of an op, given possible shards of its operands and results."""

from __future__ import annotations

from collections.abc import Iterable

from fxpar.ir.layout import REPLICATE, Placement, Shard
from fxpar.rules.rule import OpCall, Operand, Rule, Shape, Strategy


def candidate_shards(shape: Shape, parts: int) -> list[Shard]:
    """The even shards of each dim with `outer` 1."""
    return [Shard(dim, parts) for dim, size in enumerate(shape) if size > 0 and Shard(dim, parts).fits(size)]


def replicated(call: OpCall) -> Strategy:
    """The strategy in which every rank runs the whole op."""
    inputs: tuple[Placement, ...] = (REPLICATE,) * len(call.inputs)
    outputs: tuple[Placement, ...] = (REPLICATE,) * len(call.outputs)
    return Strategy(inputs, outputs, divides_work=False)


def admissible(call: OpCall, rule: Rule | None, seeds: Iterable[tuple[Operand, Shard]]) -> list[Strategy]:
    """The strategies of an op over one axis: replicated, with partial values, with a shard of `seeds`; each once."""
    found = {replicated(call): None}
    if rule is not None:
        found.update(dict.fromkeys(rule.linear(call)))
        extended = (rule.extend(call, operand, shard) for operand, shard in seeds)
        found.update((strategy, None) for strategy in extended if strategy is not None)
    return list(found)
