"""Where the samples of a batch are in the results of an op, given where they are in its operands."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fxpar.costs.dataflow import Operation
from fxpar.ir.layout import Partial, Placement, Shard
from fxpar.ir.samples import Reduced, Samples
from fxpar.rules import rule_for
from fxpar.rules.call import argument, has_parameter
from fxpar.rules.einsum_rule import EinsumRule
from fxpar.rules.rule import OpCall, Operand, Rule

aten = torch.ops.aten


def samples_of_results(
    operation: Operation, call: OpCall, operands: Sequence[Samples | None]
) -> list[Samples | None] | None:
    """Where samples are in each result, None if it does not depend on the batch; None alone if the op mixes samples.

    An op mixes no samples if it can run on each by itself: its rule says whether the batch dim can be cut into single
    samples, and which placements the other operands need then. It may reduce them.
    """
    rule, given = rule_for(call.target), list(operands)
    _ignore_unread(rule, call, given)
    if all(samples is None for samples in given):
        return [None] * len(call.outputs)
    if _is_batch_statistic(call):
        return None
    if Reduced.UNKNOWN in given:
        return [Reduced.UNKNOWN] * len(call.outputs)
    if rule is None:
        return _of_leading_dims(call, given)
    if any(isinstance(samples, Reduced) for samples in given):
        return _of_sums(rule, call, given)
    found = _of_samples(rule, call, given)
    if found is None and (call.target in _PICKING or not _computes(operation)):
        return _picked(call, given)
    return found


def _ignore_unread(rule: Rule | None, call: OpCall, given: list[Samples | None]) -> None:
    """Ignore operands of which the op uses only the dtype and the device, or the shape where that has no samples."""
    if call.target in _SHAPED_LIKE:
        given[:] = [samples if isinstance(samples, Shard) else None for samples in given]
    notation = rule.einsum_of(call) if isinstance(rule, EinsumRule) else None
    for index, pattern in enumerate(notation.inputs if notation is not None else ()):
        if pattern is None:
            given[index] = None


_SHAPED_LIKE = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default)
_ADDING = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
_COPYING = (aten._to_copy.default, aten.detach.default, aten.alias.default, aten.clone.default)
_DIVIDING = (aten.div.Tensor, aten.div.Scalar)


def _of_sums(rule: Rule, call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None] | None:
    """A linear function of sums is one again; an op on a sum and on samples combines each sample with all others."""
    if call.target in _COPYING:
        return list(given)
    reduced = {samples for samples in given if isinstance(samples, Reduced)}
    if Reduced.MAX in reduced or any(isinstance(samples, Shard) for samples in given):
        return None
    if call.target in _ADDING:
        return [_of_terms(reduced, has_others=len(given) == 1 or None in given)]
    sums = {index for index, samples in enumerate(given) if samples is not None}
    linear = [
        {index for index, placement in enumerate(strategy.inputs) if isinstance(placement, Partial)}
        for strategy in rule.linear(call)
    ]
    if not any(sums <= operands for operands in linear):
        return None
    found = _of_terms(reduced, has_others=sums not in linear)
    return [Reduced.MEAN if found is Reduced.SUM and call.target in _DIVIDING else found] * len(call.outputs)


def _of_terms(reduced: set[Reduced], *, has_others: bool) -> Reduced:
    """What a sum of such terms is, or their concatenation, if others do not depend on the batch.

    These change a mean as they change that of a part. In a sum over parts they would count several times.
    """
    if reduced == {Reduced.SUM} and not has_others:
        return Reduced.SUM
    return Reduced.MEAN if reduced == {Reduced.MEAN} else Reduced.LINEAR


def _of_samples(rule: Rule, call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None] | None:
    """Where samples are in the results if the op can run on every sample by itself, else None."""
    index, shard = next((index, samples) for index, samples in enumerate(given) if isinstance(samples, Shard))
    strategy = rule.extend(call, Operand("input", index), shard)
    if strategy is None:
        return None
    if any(samples not in (None, need) for samples, need in zip(given, strategy.inputs, strict=True)):
        return None
    return [_samples_in(placement) for placement in strategy.outputs]


def _samples_in(placement: Placement) -> Samples | None:
    """The samples in a result, if `placement` is where single samples would be."""
    if isinstance(placement, Partial):
        return Reduced.SUM if placement.op == "sum" else Reduced.MAX
    return placement if isinstance(placement, Shard) else None


def _of_leading_dims(call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None]:
    """For an op without a rule: a result that has the operand's sizes up to the batch dim keeps the samples there."""
    shards = {samples for samples in given if samples is not None}
    index, shard = next((index, samples) for index, samples in enumerate(given) if samples is not None)
    if len(shards) > 1 or not isinstance(shard, Shard):
        return [Reduced.UNKNOWN] * len(call.outputs)
    leading = call.inputs[index][: shard.dim + 1]
    return [
        shard if shape is not None and shape[: shard.dim + 1] == leading else Reduced.UNKNOWN for shape in call.outputs
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
    """Whether the op is a batch norm by the statistics of the batch. Batch norms have no rule."""
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
    """Whether the op computes with numbers rather than positions and conditions, which may be sorted and counted."""
    return any(value.tensor.is_floating_point() for value in operation.operands)


def _picked(call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None]:
    """Where samples are in the result of an index: `x[arange(batch), position]` picks from each sample separately."""
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
    return [Reduced.UNKNOWN] * len(call.outputs)


def _counts_from_zero(node: fx.Node) -> bool:
    """Whether `node` is 0, 1, 2, ... along its first dim."""
    while node.target in (aten.unsqueeze.default, aten.view.default, aten._to_copy.default, operator.getitem):
        node = node.all_input_nodes[0]
    if node.target is aten.arange.default:
        return True
    if node.target not in (aten.arange.start, aten.arange.start_step):
        return False
    start, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
    return (start, step) == (0, 1)
