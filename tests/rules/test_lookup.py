"""Which rule an op has, and how users give one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.errors import InvalidRuleError
from fxpar.ir.layout import Shard
from fxpar.rules import register_rule, rule_for
from fxpar.rules.prove import prove, prove_two_axes
from fxpar.rules.rule import Strategy

aten = torch.ops.aten


def test_pointwise_ops_are_found_by_their_tag() -> None:
    assert rule_for(aten.erf.default) is not None


@pytest.mark.parametrize("target", [aten.erf_.default, aten.bernoulli.p, aten.native_dropout.default, aten.svd.default])
def test_ops_that_write_draw_or_are_unknown_have_no_rule(target: Callable[..., Any]) -> None:
    assert rule_for(target) is None


@torch.library.custom_op("fxpar_test::scale_rows", mutates_args=())
def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """A user's op: multiply each row by its factor."""
    return x * factors[:, None]


def test_a_users_rule_is_used_and_proved() -> None:
    op = torch.ops.fxpar_test.scale_rows.default
    register_rule(op, "m n, m -> m n")
    proved = prove(op, (torch.randn(4, 6), torch.randn(4)), {}, 2)
    assert Strategy((Shard(0, 2), Shard(0, 2)), (Shard(0, 2),)) in proved
    assert prove_two_axes(op, (torch.randn(4, 6), torch.randn(4)), {}, 2) > len(proved)


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("m n, m", "expected '->' between operands and results, found none"),
        ("m n -> m n", "expected 2 operands, found 1"),
        ("m n, m -> m n, m", "expected 1 results, found 2"),
    ],
)
def test_notation_that_does_not_fit_the_op_is_refused(notation: str, message: str) -> None:
    with pytest.raises(InvalidRuleError, match=f"fxpar_test.scale_rows.default: {message}; name every tensor"):
        register_rule(torch.ops.fxpar_test.scale_rows.default, notation)


def test_a_rule_for_a_packet_of_overloads_is_refused() -> None:
    with pytest.raises(InvalidRuleError, match=r"such as torch.ops.aten.mm.default"):
        register_rule(aten.mm, "m k, k n -> m n")
