"""Where the samples of a batch are in the results of an op, given where they are in its operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.costs.dataflow import Operation
from fxpar.ir.layout import Partial, Placement, Shard
from fxpar.ir.op_predicates import is_view
from fxpar.ir.samples import Reduced, Samples
from fxpar.rules import rule_for
from fxpar.rules.call import argument, dim_argument, has_parameter
from fxpar.rules.einsum_rule import EinsumRule
from fxpar.rules.losses import MEAN, SUM
from fxpar.rules.rule import OpCall, Operand, Rule, Shape

aten = torch.ops.aten


def samples_of_results(
    operation: Operation,
    call: OpCall,
    operands: Sequence[Samples | None],
    counts_samples: Callable[[float], bool] = lambda number: True,
) -> list[Samples | None] | None:
    """Where samples are in each result, None if it does not depend on the batch; None alone if the op mixes samples.

    An op mixes no samples if it can run on each by itself: its rule says whether the batch dim can be cut into single
    samples, and which placements the other operands need then. It may reduce them.

    Args:
        counts_samples: whether a sum over samples that is divided by this number is a mean.
    """
    rule, given = _rule_for(call.target), list(operands)
    _ignore_unread(rule, call, given)
    by_count = Reduced.COUNT in given
    given = [None if samples is Reduced.COUNT else samples for samples in given]
    if all(samples is None for samples in given):
        return [Reduced.COUNT if by_count else None] * len(call.outputs)
    if _is_batch_statistic(call):
        return None
    if Reduced.UNKNOWN in given:
        return [Reduced.UNKNOWN] * len(call.outputs)
    if rule is None:
        return _without_rule(operation, call, given)
    if any(isinstance(samples, Reduced) for samples in given):
        found = _of_sums(rule, call, given)
        return _divided(call, found, by_count, counts_samples) if found == [Reduced.SUM] else found
    found = _of_samples(rule, call, given)
    if found is None and (call.target in _PICKING or not _computes(operation)):
        return _picked(call, given)
    return found


def _rule_for(target: Callable[..., Any]) -> Rule | None:
    """The op's rule, if it tells where samples go: not that of ops that read memory whatever its dims."""
    return None if target in (aten.as_strided.default, aten.as_strided_scatter.default) else rule_for(target)


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
    return [_of_terms(reduced, has_others=sums not in linear)] * len(call.outputs)


def _divided(
    call: OpCall, found: list[Samples | None], by_count: bool, counts_samples: Callable[[float], bool]
) -> list[Samples | None]:
    """A sum that is divided by a number of samples, of this part or of the whole batch, is a mean."""
    if call.target not in _DIVIDING:
        return found
    divisor = call.args[1]
    is_mean = counts_samples(divisor) if isinstance(divisor, int | float) else by_count
    return [Reduced.MEAN] if is_mean else found


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


def _without_rule(operation: Operation, call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None] | None:
    """For an op without a rule: a result that has the operand's sizes up to the batch dim keeps the samples there.

    A loss with a reduction says which one it is. What else is computed with samples is taken to mix them, but by
    functions of the user.
    """
    found: list[Samples | None] = [_kept(call, given, shape) for shape in call.outputs]
    if not isinstance(call.target, torch._ops.OpOverload):
        return found
    reduced = _REDUCTIONS.get(argument(call, "reduction")) if has_parameter(call, "reduction") else None
    if reduced is not None:
        return [reduced] * len(call.outputs)
    return None if Reduced.UNKNOWN in found and _computes(operation) else found


def _kept(call: OpCall, given: Sequence[Samples | None], result: Shape | None) -> Samples:
    """Where a result has the samples that all operands have in one dim."""
    shards = {samples for samples in given if samples is not None}
    index, shard = next((index, samples) for index, samples in enumerate(given) if samples is not None)
    if len(shards) > 1 or not isinstance(shard, Shard) or result is None:
        return Reduced.UNKNOWN
    leading = call.inputs[index][: shard.dim + 1]
    return shard if result[: shard.dim + 1] == leading else Reduced.UNKNOWN


_REDUCTIONS = {MEAN: Reduced.MEAN, SUM: Reduced.SUM}


def samples_after_mixing(call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None]:
    """Where samples are in the results of an op that mixes them: a norm over the batch leaves them where they are."""
    unknown: list[Samples | None] = [Reduced.UNKNOWN] * len(call.outputs)
    return [given[0], *unknown[1:]] if _is_batch_statistic(call) else unknown


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
    return any(value.tensor.is_floating_point() or value.tensor.is_complex() for value in operation.operands)


def _picked(call: OpCall, given: Sequence[Samples | None]) -> list[Samples | None] | None:
    """Where samples are in the result of an index: `x[arange(batch), position]` picks from each sample separately.

    An index of samples that is the same for every batch, or is given with it, is one of the whole batch: it mixes
    samples, where an index that is computed from a part of them need not.
    """
    samples, indices = given[0], _indices(call)
    picked = indices.get(samples.dim) if isinstance(samples, Shard) else None
    if not isinstance(samples, Shard) or picked is None:
        return [Reduced.UNKNOWN] * len(call.outputs)
    first, (result,) = min(indices), call.outputs
    if call.target in _INDEXING and samples.outer == 1 and max(indices) - first < len(indices) and result is not None:
        shard = Shard(first, samples.parts)
        counts_samples = _counts_from_zero(picked) and result[first] == call.inputs[0][samples.dim]
        if counts_samples and all(each in (None, shard, Shard(0, samples.parts)) for each in given[1:]):
            return [shard]
    is_of_whole = _is_given(picked) or all(each is None for each in given[1 : 1 + len(indices)])
    return None if is_of_whole else [Reduced.UNKNOWN] * len(call.outputs)


_INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor)


def _indices(call: OpCall) -> dict[int, fx.Node]:
    """The indices of a tensor by its dims; empty for other ops."""
    if call.target not in _PICKING or call.target is aten.embedding.default:
        return {}
    if has_parameter(call, "indices"):
        return {dim: index for dim, index in enumerate(argument(call, "indices")) if index is not None}
    return {dim_argument(call): argument(call, "index")}


_RESHAPING = (aten.unsqueeze.default, aten.view.default, aten._to_copy.default, operator.getitem)


def _is_given(node: fx.Node) -> bool:
    """Whether `node` has values of an input, at most some of them, in another shape or dtype."""
    while node.target in _RESHAPING or is_view(node.target):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _counts_from_zero(node: fx.Node) -> bool:
    """Whether `node` is 0, 1, 2, ... along its first dim."""
    while node.target in _RESHAPING:
        node = node.all_input_nodes[0]
    if node.target is aten.arange.default:
        return True
    if node.target not in (aten.arange.start, aten.arange.start_step):
        return False
    start, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
    return (start, step) == (0, 1)
