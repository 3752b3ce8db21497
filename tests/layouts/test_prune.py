"""Strategies that no choice can contain are struck out, and no others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpar.costs.dataflow import Operation, Value, operations
from fxpar.ir.layout import REPLICATE, Partial, Placement, Shard
from fxpar.layouts.prune import prune
from fxpar.rules.rule import Strategy
from tests.layouts.laid_out import decomposed

ROWS = Shard(0, 2)


class Chain(nn.Module):
    """Two unary ops."""

    def forward(self, x: Tensor) -> Tensor:
        return x.neg().sin()


def chain() -> list[Operation]:
    return operations(decomposed(Chain(), torch.randn(4), with_backward=False))


def unary(*placements: Placement) -> tuple[Strategy, ...]:
    return tuple(Strategy((p,), (p,)) for p in placements)


def enters(*placements: Placement) -> tuple[Strategy, ...]:
    return tuple(Strategy((), (p,)) for p in placements)


def leaves(*placements: Placement) -> tuple[Strategy, ...]:
    return tuple(Strategy((p,), ()) for p in placements)


def test_a_partial_operand_must_be_given_as_it_is() -> None:
    strategies = [enters(REPLICATE), unary(REPLICATE, Partial()), unary(REPLICATE, Partial()), leaves(REPLICATE)]
    expected = [enters(REPLICATE), unary(REPLICATE), unary(REPLICATE), leaves(REPLICATE)]
    assert prune(chain(), strategies, set()) == expected


def test_what_does_not_move_is_taken_as_it_lies_and_given_as_it_is_needed() -> None:
    program = chain()
    immovable = {value for operation in program[:2] for value in operation.results if value is not None}
    strategies = [enters(REPLICATE, ROWS), unary(REPLICATE, ROWS), unary(ROWS), leaves(REPLICATE, ROWS)]
    assert prune(program, strategies, immovable) == [enters(ROWS), unary(ROWS), unary(ROWS), leaves(REPLICATE, ROWS)]


def test_an_impossible_choice_leaves_an_operation_without_strategies() -> None:
    program = chain()
    strategies = [enters(ROWS), unary(REPLICATE), unary(REPLICATE), leaves(REPLICATE)]
    assert () in prune(program, strategies, {Value(program[0].node)})
    assert prune(program, strategies, set()) == strategies
