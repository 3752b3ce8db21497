"""Look up the rule of an op, or register one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpar._torch.compiler import schema
from fxpar.errors import InvalidRuleError
from fxpar.ir.flex_attention import FlexCall
from fxpar.ir.op_predicates import is_pointwise, is_random
from fxpar.rules.call import parameters
from fxpar.rules.einsum import parse
from fxpar.rules.einsum_rule import EinsumRule
from fxpar.rules.flex_attention import FLEX_ATTENTION
from fxpar.rules.rule import Rule
from fxpar.rules.table import LIBRARY_OPS, POINTWISE, TABLE

_registered: dict[Callable[..., Any], Rule] = {}
"""Rules that users registered; they take precedence over the table's."""


def rule_for(target: Callable[..., Any]) -> Rule | None:
    """The sharding rule of an op, or None where it has none and so is replicated."""
    if isinstance(target, FlexCall):
        return FLEX_ATTENTION
    rule = _registered.get(target) or TABLE.get(target)
    if rule is None and isinstance(target, torch._ops.OpOverload):
        rule = LIBRARY_OPS.get(target.name())
    return POINTWISE if rule is None and _maps_elements(target) else rule


def _maps_elements(target: Callable[..., Any]) -> bool:
    """Whether the op is pointwise, and neither draws random numbers nor writes to its operands."""
    return is_pointwise(target) and not is_random(target) and not schema(target).is_mutable


def register_rule(target: Callable[..., Any], rule: str | Rule) -> None:
    """Give an op a sharding rule: a `Rule`, or einsum notation, one operand per tensor parameter of its schema.

    The notation is explained in `fxpar.rules.einsum`; `fxpar.rules.prove` checks a rule against the op.

    Raises:
        InvalidRuleError: the notation has no arrow, or names other than the op's tensor parameters and results.
    """
    if isinstance(rule, str):
        _check_notation(target, rule)
        rule = EinsumRule(rule)
    _registered[target] = rule


def registered_rules() -> tuple[str, ...]:
    """The ops that users have given rules."""
    return tuple(sorted(map(str, _registered)))


def _check_notation(target: Callable[..., Any], notation: str) -> None:
    if not isinstance(target, torch._ops.OpOverload):
        raise InvalidRuleError(
            target, notation, "an overload of an op, such as torch.ops.aten.mm.default", repr(target)
        )
    if "->" not in notation:
        raise InvalidRuleError(target, notation, "'->' between operands and results", "none")
    operands, results = parse(notation)
    takes, gives = sum(parameter.takes_tensor for parameter in parameters(target)), len(schema(target).returns)
    if len(operands) != takes:
        raise InvalidRuleError(target, notation, f"{takes} operands", str(len(operands)))
    if len(results) != gives:
        raise InvalidRuleError(target, notation, f"{gives} results", str(len(results)))
