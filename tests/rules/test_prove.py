"""The prover refuses wrong rules; what it accepts is proved elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fxpar.ir.layout import REPLICATE, Partial, Shard
from fxpar.rules.einsum_rule import EinsumRule, call_as_is
from fxpar.rules.prove import RuleDisprovedError, prove
from fxpar.rules.rule import LocalOp, OpCall, Operand, Strategy

aten = torch.ops.aten


def test_a_dim_called_free_that_must_be_whole_is_found() -> None:
    with pytest.raises(
        RuleDisprovedError, match=r"_softmax.default on \[4, 6\] with x: S\(1\) -> S\(1\): .*difference"
    ):
        prove(aten._softmax.default, (torch.randn(4, 6), 1, False), {}, 2, rule=EinsumRule("a b -> a b"))


def test_partial_sums_through_an_op_that_is_not_linear_are_found() -> None:
    with pytest.raises(RuleDisprovedError, match=r"P\(sum\) -> P\(sum\): result 0, reduced"):
        prove(aten.exp.default, (torch.randn(4),), {}, 2, rule=EinsumRule("a -> a", linear_in="each"))


def test_a_bias_that_would_be_added_once_per_rank_is_found() -> None:
    strategy = Strategy((Partial("sum"), REPLICATE), (Partial("sum"),))
    with pytest.raises(RuleDisprovedError, match=r"P\(sum\), R -> P\(sum\)"):
        prove(aten.add.Tensor, (torch.randn(4), torch.randn(4)), {}, 2, [strategy])


def test_a_logical_shape_left_in_a_local_op_is_found() -> None:
    with pytest.raises((RuleDisprovedError, RuntimeError), match="expand"):
        prove(aten.expand.default, (torch.randn(4, 1), [4, 6]), {}, 2, rule=EinsumRule("a 1 -> a b"))


def test_a_result_in_another_memory_order_is_found() -> None:
    def emit(local: LocalOp) -> fx.Node:
        return local.emit(aten.clone.default, call_as_is(local), memory_format=torch.contiguous_format)

    with pytest.raises(RuleDisprovedError, match="strides in the order of the whole"):
        prove(aten.neg.default, (torch.randn(4, 6).t(),), {}, 2, rule=EinsumRule("a b -> a b", emit_local=emit))


def test_a_kernel_that_takes_slices_for_dense_operands_is_found() -> None:
    rule = EinsumRule("... H, ... H, ... 1, ... 1, H, H -> ... H, H, H")
    x, gradient, weight = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(8)
    _, mean, rstd = aten.native_layer_norm.default(x, [8], weight, weight, 1e-5)
    args = (gradient, x, [8], mean, rstd, weight, weight, [True, True, True])
    with pytest.raises(RuleDisprovedError, match="sliced operands"):
        prove(aten.native_layer_norm_backward.default, args, {}, 2, rule=rule)


def test_a_kernel_that_takes_dense_operands_for_slices_is_found() -> None:
    def copy(x: Tensor) -> Tensor:
        return x + 1 if x.size(1) < 6 and x.is_contiguous() else x.clone()

    def emit(local: LocalOp) -> fx.Node:
        return local.emit(copy, *local.args)

    with pytest.raises(RuleDisprovedError, match="dense operands"):
        prove(aten.alias.default, (torch.randn(4, 6),), {}, 2, rule=EinsumRule("A b -> A b", emit_local=emit))


class _OneWay(EinsumRule):
    """Finds a strategy from the result that it does not find from the operand."""

    __slots__ = ()

    def extend(self, call: OpCall, operand: Operand, shard: Shard) -> Strategy | None:
        return None if operand.role == "input" else Strategy((shard,), (shard,))


def test_a_strategy_that_depends_on_where_the_search_starts_is_found() -> None:
    with pytest.raises(RuleDisprovedError, match="the rule finds nothing"):
        prove(aten.neg.default, (torch.randn(4),), {}, 2, rule=_OneWay("a -> a"))


def test_it_returns_what_it_proved() -> None:
    proved = prove(aten.mm.default, (torch.randn(2, 2), torch.randn(2, 2)), {}, 2)
    assert set(proved) == {
        Strategy((REPLICATE, REPLICATE), (REPLICATE,), divides_work=False),
        Strategy((Partial("sum"), REPLICATE), (Partial("sum"),), divides_work=False),
        Strategy((REPLICATE, Partial("sum")), (Partial("sum"),), divides_work=False),
        Strategy((Shard(0, 2), REPLICATE), (Shard(0, 2),)),
        Strategy((Shard(1, 2), Shard(0, 2)), (Partial("sum"),)),
        Strategy((REPLICATE, Shard(1, 2)), (Shard(1, 2),)),
    }
