"""What einsum notation says about sharding."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxpar.ir.layout import REPLICATE, Partial, Placement, Shard
from fxpar.rules import rule_for
from fxpar.rules.einsum_rule import EinsumRule
from fxpar.rules.rule import OpCall, Operand, Rule, Shape, Strategy

aten = torch.ops.aten


def call_of(target: torch._ops.OpOverload, *args: object, outputs: tuple[Shape | None, ...]) -> OpCall:
    """A call whose tensor operands are given as shapes (tuples)."""
    graph = fx.Graph()
    shapes = []

    def operand(arg: object) -> object:
        if not isinstance(arg, tuple):
            return arg
        node = graph.placeholder(f"operand_{len(shapes)}")
        node.meta["val"] = torch.empty(arg, device="meta")
        shapes.append(arg)
        return node

    return OpCall(target, tuple(map(operand, args)), {}, tuple(shapes), outputs)


def extend(rule: Rule | None, call: OpCall, role: str, index: int, shard: Shard) -> tuple[Placement, ...] | None:
    """The placements of operands and results in the strategy that starts from a shard."""
    assert rule is not None
    strategy = rule.extend(call, Operand("input" if role == "input" else "output", index), shard)
    return strategy and (*strategy.inputs, *strategy.outputs)


MM = call_of(aten.mm.default, (4, 6), (6, 8), outputs=((4, 8),))


def test_a_letter_is_sharded_wherever_it_stands() -> None:
    assert extend(rule_for(aten.mm.default), MM, "input", 0, Shard(0, 2)) == (Shard(0, 2), REPLICATE, Shard(0, 2))
    assert extend(rule_for(aten.mm.default), MM, "output", 0, Shard(1, 2)) == (REPLICATE, Shard(1, 2), Shard(1, 2))


def test_a_letter_that_the_result_lacks_makes_a_partial_sum() -> None:
    assert extend(rule_for(aten.mm.default), MM, "input", 1, Shard(0, 3)) == (Shard(1, 3), Shard(0, 3), Partial("sum"))


def test_amax_over_a_sharded_dim_is_a_partial_maximum() -> None:
    call = call_of(aten.amax.default, (4, 6), [1], outputs=((4,),))
    assert extend(rule_for(aten.amax.default), call, "input", 0, Shard(1, 2)) == (Shard(1, 2), Partial("max"))


def test_a_shard_that_starts_inside_a_dim_passes_with_its_letter() -> None:
    inside = Shard(1, 2, outer=4)
    assert extend(rule_for(aten.mm.default), MM, "input", 1, inside) == (REPLICATE, inside, inside)


def test_a_capital_letter_is_whole() -> None:
    call = call_of(aten.tril.default, (4, 6, 6), outputs=((4, 6, 6),))
    assert extend(rule_for(aten.tril.default), call, "input", 0, Shard(0, 2)) == (Shard(0, 2), Shard(0, 2))
    assert extend(rule_for(aten.tril.default), call, "input", 0, Shard(1, 2)) is None


def test_a_ragged_shard_gives_every_rank_something_or_is_refused() -> None:
    rule = rule_for(aten.neg.default)
    seven, five = (call_of(aten.neg.default, (size,), outputs=((size,),)) for size in (7, 5))
    assert extend(rule, seven, "input", 0, Shard(0, 4)) == (Shard(0, 4), Shard(0, 4))
    assert extend(rule, five, "input", 0, Shard(0, 4)) is None  # pieces of 2, 2, 1, 0
    assert extend(rule, seven, "input", 0, Shard(0, 2, outer=2)) is None


def test_a_broadcast_dim_is_not_sharded() -> None:
    call = call_of(aten.add.Tensor, (4, 1), (4, 6), outputs=((4, 6),))
    assert extend(rule_for(aten.add.Tensor), call, "input", 1, Shard(1, 2)) == (REPLICATE, Shard(1, 2), Shard(1, 2))
    assert extend(rule_for(aten.add.Tensor), call, "input", 0, Shard(1, 2)) is None


def test_an_operand_that_is_absent_takes_no_pattern() -> None:
    shape, row = (4, 6, 8), (4, 6, 1)
    call = call_of(aten.native_layer_norm.default, shape, [8], None, None, 1e-5, outputs=(shape, row, row))
    assert extend(rule_for(call.target), call, "input", 0, Shard(1, 2)) == (Shard(1, 2),) * 4
    assert extend(rule_for(call.target), call, "input", 0, Shard(2, 2)) is None


def test_a_result_that_is_absent_counts_as_replicated() -> None:
    shape, row = (4, 8), (4, 1)
    args = (shape, shape, [8], row, row, (8,), None, [True, True, False])
    call = call_of(aten.native_layer_norm_backward.default, *args, outputs=(shape, (8,), None))
    placements = extend(rule_for(call.target), call, "input", 0, Shard(0, 2))
    assert placements == (Shard(0, 2),) * 4 + (REPLICATE, Shard(0, 2), Partial("sum"), REPLICATE)


def test_one_letter_may_have_a_divisor_of_its_size_elsewhere() -> None:
    query, key = (2, 8, 4, 16), (2, 4, 4, 16)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    call = call_of(kernel, query, key, key, outputs=(query, query[:3]))
    assert extend(rule_for(kernel), call, "input", 0, Shard(1, 4)) == (Shard(1, 4),) * 5
    assert extend(rule_for(kernel), call, "input", 0, Shard(1, 8)) is None


@pytest.mark.parametrize(
    ("target", "operands", "expected"),
    [
        (aten.mm.default, ((4, 4), (4, 4)), {"PR", "RP"}),
        (aten.add.Tensor, ((4, 4), (4,)), {"PP"}),
        (aten.add.Tensor, ((4, 4), 1.0), set()),
        (aten.mul.Tensor, ((4, 4), 2.0), {"P"}),
        (aten.div.Tensor, ((4, 4), (4,)), {"PR"}),
        (aten.where.self, ((4, 4), (4, 4), (4, 4)), {"RPP"}),
        (aten.gelu.default, ((4, 4),), set()),
    ],
)
def test_partial_sums_pass_linear_ops(
    target: torch._ops.OpOverload, operands: tuple[object, ...], expected: set[str]
) -> None:
    call = call_of(target, *operands, outputs=((4, 4),))
    rule = rule_for(target)
    assert rule is not None
    strategies = rule.linear(call)
    assert {"".join("P" if isinstance(p, Partial) else "R" for p in s.inputs) for s in strategies} == expected
    assert all(s.outputs == (Partial("sum"),) for s in strategies)


def test_partial_maxima_pass_views_alone() -> None:
    view = call_of(aten.view.default, (4, 4), [16], outputs=((16,),))
    negation = call_of(aten.neg.default, (4, 4), outputs=((4, 4),))
    passed = Strategy((Partial("max"),), (Partial("max"),), divides_work=False)
    assert passed in _linear(view)
    assert passed not in _linear(negation)


def _linear(call: OpCall) -> list[Strategy]:
    rule = rule_for(call.target)
    assert rule is not None
    return list(rule.linear(call))


def test_notation_that_names_too_few_operands_is_refused() -> None:
    with pytest.raises(AssertionError, match="names 1 operands, the op takes 2"):
        EinsumRule("m k -> m").extend(MM, Operand("input", 0), Shard(0, 2))
