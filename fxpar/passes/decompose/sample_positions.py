"""Where the samples of a batch lie in what one op returns, given where they lie in its operands."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import torch
from torch import fx

from fxpar.costs.dataflow import Operation
from fxpar.ir.layout import Partial, Shard
from fxpar.rules import rule_for
from fxpar.rules.call import argument, has_parameter
from fxpar.rules.einsum_rule import EinsumRule
from fxpar.rules.rule import OpCall, Operand, Rule

aten = torch.ops.aten


class Other(Enum):
    """What a value that depends on the batch is, if it has no dim along which the samples lie.

    SUM is a sum over samples, and linear functions of it. Of what is UNKNOWN nothing is said.
    """

    SUM = "sum"
    UNKNOWN = "unknown"


Samples: TypeAlias = Shard | Other
"""Of a value that depends on the batch: the dim, or part of one, along which the samples lie, or what else it is."""


def samples_of_results(
    operation: Operation, call: OpCall, operands: Sequence[Samples | None]
) -> list[Samples | None] | None:
    """Where the samples lie in each result, None in what does not depend on the batch; None alone if the op mixes them.

    It mixes none if it can run on each by itself: the rule of the op says whether their dim can be cut into all its
    parts, and what becomes of the other operands then.
    """
    rule, given = rule_for(call.target), list(operands)
    _ignore_unread(rule, call, given)
    if all(samples is None for samples in given):
        return [None] * len(call.outputs)
    if _is_batch_statistic(call):
        return None
    if Other.UNKNOWN in given:
        return [Other.UNKNOWN] * len(call.outputs)
    if rule is None:
        return _of_leading_dims(call, given)
    if Other.SUM in given:
        return _of_sums(rule, call, given)
    found = _of_samples(rule, call, given)
    if found is None and (call.target in _PICKING or not _computes(operation)):
        return _picked(call, given)
    return found


def _ignore_unread(rule: Rule | None, call: OpCall, given: list[Samples | None]) -> None:
    """Forget of operands that give no more than a dtype and a device."""
    notation = rule.einsum_of(call) if isinstance(rule, EinsumRule) else None
    for index, pattern in enumerate(notation.inputs if notation is not None else ()):
        if pattern is None:
            given[index] = None


_AFFINE = (aten.add.Tensor, aten.sub.Tensor, aten._to_copy.default)
"""These may add what is no sum, or round: the mean of what they give is that of a whole batch all the same."""


def _of_sums(rule: Rule, call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None] | None:
    """A linear function of sums is one; beside samples, a sum brings all to each."""
    sums = {index for index, samples in enumerate(given) if samples is Other.SUM}
    if any(isinstance(samples, Shard) for samples in given):
        return None
    linear = [
        {index for index, placement in enumerate(strategy.inputs) if isinstance(placement, Partial)}
        for strategy in rule.linear(call)
    ]
    is_linear = call.target in _AFFINE or any(sums <= operands for operands in linear)
    return [Other.SUM] * len(call.outputs) if is_linear else None


def _of_samples(rule: Rule, call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None] | None:
    """Where the samples are in the results if every sample can be treated by itself."""
    index, shard = next((index, samples) for index, samples in enumerate(given) if isinstance(samples, Shard))
    strategy = rule.extend(call, Operand("input", index), shard)
    if strategy is None:
        return None
    if any(samples not in (None, need) for samples, need in zip(given, strategy.inputs, strict=True)):
        return None
    found: list[Samples | None] = []
    for placement in strategy.outputs:
        if isinstance(placement, Partial) and placement.op != "sum":
            return None
        found.append(
            Other.SUM if isinstance(placement, Partial) else placement if isinstance(placement, Shard) else None
        )
    return found


def _of_leading_dims(call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None]:
    """Of an op without a rule: results whose dims up to the samples' are its operand's are taken to keep them there."""
    shards = {samples for samples in given if samples is not None}
    index, shard = next((index, samples) for index, samples in enumerate(given) if samples is not None)
    if len(shards) > 1 or not isinstance(shard, Shard):
        return [Other.UNKNOWN] * len(call.outputs)
    leading = call.inputs[index][: shard.dim + 1]
    return [
        shard if shape is not None and shape[: shard.dim + 1] == leading else Other.UNKNOWN for shape in call.outputs
    ]


_BATCH_NORMS = (
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten.cudnn_batch_norm,
    aten.miopen_batch_norm,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
)


def _is_batch_statistic(call: OpCall) -> bool:
    """Whether it is a batch norm, which has no rule, by the statistics of the batch."""
    if getattr(call.target, "overloadpacket", None) not in _BATCH_NORMS:
        return False
    return bool(argument(call, "training")) if has_parameter(call, "training") else True


_PICKING = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.index_select.default,
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.embedding.default,
)


def _computes(operation: Operation) -> bool:
    """Whether it computes with numbers, rather than with positions and conditions: these are sorted and counted."""
    return any(value.tensor.is_floating_point() for value in operation.operands)


def _picked(call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None]:
    """Where the samples are in what an index picks: `x[arange(batch), position]` picks from every sample for itself."""
    samples, indices = given[0], call.args[1] if len(call.args) > 1 else None
    is_index = call.target in (aten.index.Tensor, aten._unsafe_index.Tensor)
    if is_index and isinstance(samples, Shard) and isinstance(indices, list | tuple) and samples.outer == 1:
        at = [dim for dim, index in enumerate(indices) if index is not None]
        picked, (result,) = indices[samples.dim] if samples.dim < len(indices) else None, call.outputs
        if picked is not None and at == [*range(at[0], at[-1] + 1)] and result is not None:
            shard = Shard(at[0], samples.parts)
            counts_samples = _counts_from_zero(picked) and result[at[0]] == call.inputs[0][samples.dim]
            if counts_samples and all(each in (None, shard, Shard(0, samples.parts)) for each in given[1:]):
                return [shard]
    return [Other.UNKNOWN] * len(call.outputs)


def _counts_from_zero(node: fx.Node) -> bool:
    """Whether it is 0, 1, 2, ... along its first dim."""
    while node.target in (aten.unsqueeze.default, aten.view.default, aten._to_copy.default, operator.getitem):
        node = node.all_input_nodes[0]
    if node.target is aten.arange.default:
        return True
    if node.target not in (aten.arange.start, aten.arange.start_step):
        return False
    start, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
    return (start, step) == (0, 1)
