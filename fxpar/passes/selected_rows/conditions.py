"""Conditions of branches, which values of tensors decide."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.capture import example
from fxpar.ir.node_meta import known_value
from fxpar.passes.selected_rows.found import Found
from fxpar.passes.selected_rows.rows import RowWriter

_OF_NUMBERS: Mapping[Any, Any] = {
    torch.sym_not: torch.logical_not,
    operator.not_: torch.logical_not,
    **{each: each for each in (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)},
}
"""What computes on tensors what conditions compute of numbers."""


@dataclass(frozen=True, slots=True)
class Condition:
    """When a branch is taken: where the truth of a tensor of one element, or of a number of one, is `holds`.

    mask: the mask of which it asks whether it selects anything, if it does only that.
    """

    node: fx.Node
    holds: bool
    mask: fx.Node | None


def read_condition(node: fx.Node, holds: bool, found: Found) -> Condition:
    """The condition that the truth of `node` is `holds`."""
    return Condition(node, holds, _asked_for(node, holds, found))


def _asked_for(node: fx.Node, holds: bool, found: Found) -> fx.Node | None:
    match node.target, node.args:
        case (("any" | torch.any), (fx.Node() as mask,)) if holds and not node.kwargs:
            return found.first_of(mask)
        case ((operator.gt | operator.ne), (fx.Node() as number, 0)) if holds:
            return found.counted_mask(number)
        case (operator.ge, (fx.Node() as number, 1)) if holds:
            return found.counted_mask(number)
        case (operator.eq, (fx.Node() as number, 0)) if not holds:
            return found.counted_mask(number)
    return found.counted_mask(node) if holds else None


def truth_of(condition: Condition, found: Found, writer: RowWriter) -> fx.Node | None:
    """Whether the condition holds, as a boolean tensor without dims; None if it is computed of other sizes."""
    number = _as_tensor(condition.node, found, writer)
    if number is None:
        return None
    truth = number if example(number).dtype == torch.bool else writer.call(operator.ne, number, 0)
    truth = writer.call("reshape", truth, ()) if example(truth).dim() else truth
    return truth if condition.holds else writer.call(torch.logical_not, truth)


def _as_tensor(node: fx.Node, found: Found, writer: RowWriter) -> fx.Node | None:
    """A number as a tensor, also if it is computed of numbers of selected rows."""
    if isinstance(known_value(node), Tensor):
        return node
    if (mask := found.counted_mask(node)) is not None:
        return writer.call("sum", writer.chosen(mask, tuple(range(example(mask).dim()))))
    if node.target not in _OF_NUMBERS:
        return None
    numbers = [_as_tensor(each, found, writer) if isinstance(each, fx.Node) else each for each in node.args]
    return None if None in numbers else writer.call(_OF_NUMBERS[node.target], *numbers)
