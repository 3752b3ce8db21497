"""Find what mixes the samples of a batch: its results depend on how the batch is divided."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from fxpar.annotate import where
from fxpar.capture import Capture
from fxpar.config import is_first_rank
from fxpar.layout import Partial, Shard
from fxpar.layouts.dataflow import Border, Operation, Value, operations
from fxpar.mesh import num_batch_shards
from fxpar.model.distribution import Distribution
from fxpar.passes.cut import closure, operands
from fxpar.rules import rule_for
from fxpar.rules.call import argument, has_parameter
from fxpar.rules.einsum_rule import EinsumRule
from fxpar.rules.rule import OpCall, Operand, Rule
from fxpar.stage import JointGraph, Port, PortKind

aten = torch.ops.aten


class Other(Enum):
    """What a value that depends on the batch is, if it has no dim along which the samples lie.

    SUM is a sum over samples, and linear functions of it. Of what is UNKNOWN nothing is said.
    """

    SUM = "sum"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Batched:
    """A value that depends on the batch: where the samples lie, and whether parameters have a part in it."""

    samples: Shard | Other
    trained: bool


def warn_of_batch_mixing(stages: Sequence[JointGraph], capture: Capture, distribution: Distribution) -> None:
    """Say once where the loss of the model that is `distribution` depends on how the batch is divided, if it is."""
    microbatches, num_shards = distribution.microbatches, num_batch_shards(distribution.mesh)
    num_samples = capture.microbatch_size
    if (
        distribution.has_warned_of_mixing
        or microbatches * num_shards == 1
        or num_samples is None
        or not is_first_rank()
    ):
        return
    results = range(len(capture.results)) if capture.loss is None else [capture.loss]
    wanted = [Port(PortKind.RESULT, str(position)) for position in results]
    node = find_batch_mixing(stages, capture.batch_dims, num_samples, wanted)
    if node is not None:
        distribution.has_warned_of_mixing = True
        warnings.warn(
            f"{node.target} in {where(node)} combines samples of the batch with each other, and sees {num_samples} "
            f"at a time: the batch comes in {microbatches} microbatches on {num_shards} shards, on whose numbers the "
            "loss and its gradients therefore depend. For those of the whole batch, use one microbatch and no axes "
            "data and z, or an operation that treats every sample by itself",
            stacklevel=2,
        )


def find_batch_mixing(
    stages: Sequence[JointGraph], batch_dims: Mapping[Port, int], num_samples: int, wanted: Collection[Port]
) -> fx.Node | None:
    """The first op on the way to the outputs `wanted` that combines samples other than in a sum that leads to them.

    Such is a matrix product of samples with each other, a softmax or the statistics of a norm over the batch. What
    samples may be added up to is a loss: their sum or mean, and linear functions of it. It may be divided by what
    depends on no parameter, such as the number of tokens that count.

    Every rule says how its op runs when one dim is cut: an op mixes no samples if it can run on each by itself, with
    that dim cut into `num_samples` parts. Of ops without a rule, and of samples that are picked by an index, nothing is
    known; no op behind them is found.

    Args:
        stages: the joint graphs of all stages, in order, as decomposed for sharding.
        batch_dims: the batch dim of each input that has one, of `num_samples` in a microbatch. With one sample in each,
            nothing is found.
    """
    if num_samples == 1:  # of dims of one element, rules do not say where they go
        return None
    programs = [operations(joint) for joint in stages]
    known: dict[Port, Batched] = {}
    for program, relevant in zip(programs, _leading_to(programs, wanted), strict=True):
        tracker = _Tracker(known, batch_dims, num_samples)
        for operation in program:
            if operation.node in relevant and tracker.mixes(operation):
                return operation.node
        tracker.leave(program)
    return None


def _leading_to(programs: Sequence[Sequence[Operation]], wanted: Collection[Port]) -> list[set[fx.Node]]:
    """Of each stage the nodes on which the ports `wanted` depend."""
    ports, found = set(wanted), []
    for program in reversed(programs):
        ends = [op.operands[0].node for op in program if op.border is Border.OUTPUT and op.port in ports]
        needed = closure(ends, operands)
        ports |= {op.port for op in program if op.border is Border.INPUT and op.port and op.node in needed}
        found.append(needed)
    return found[::-1]


class _Tracker:
    """Where the samples lie in the values of one stage; `known` are those of edges."""

    def __init__(self, known: dict[Port, Batched], batch_dims: Mapping[Port, int], num_samples: int) -> None:
        self._known, self._batch_dims, self._num_samples = known, batch_dims, num_samples
        self._values: dict[Value, Batched] = {}
        self._trained: set[Value] = set()

    def mixes(self, operation: Operation) -> bool:
        """Whether the op combines samples; if it does not, its results are noted."""
        if operation.border is Border.INPUT:
            self._enter(operation)
        if operation.call is None:
            return False
        trained = any(value in self._trained for value in operation.operands)
        states = [self._values.get(value) for value in operation.operands]
        found = self._results(operation, operation.call, [None if state is None else state.samples for state in states])
        if found is None:
            return True
        for value, samples in zip(operation.results, found, strict=True):
            if value is not None:
                self._note(value, samples, trained)
        return False

    def leave(self, program: Sequence[Operation]) -> None:
        """Let later stages know of the edges."""
        for operation in program:
            if operation.border is Border.OUTPUT and operation.port is not None:
                state = self._values.get(operation.operands[0])
                if state is not None:
                    self._known[operation.port] = state

    def _enter(self, operation: Operation) -> None:
        port, (value,) = operation.port, operation.values
        assert port is not None, "an input has a port"
        if port in self._known:
            self._note(value, self._known[port].samples, self._known[port].trained)
        elif port in self._batch_dims:
            shard = Shard(self._batch_dims[port], self._num_samples)
            self._note(value, shard if shard.fits(value.tensor.shape[shard.dim]) else Other.UNKNOWN, trained=False)
        elif port.kind in (PortKind.PARAMETER, PortKind.EDGE):
            self._trained.add(value)

    def _note(self, value: Value, samples: Shard | Other | None, trained: bool) -> None:
        if trained:
            self._trained.add(value)
        # What is counted over the batch, such as tokens, and depends on no parameter, is as good as a constant.
        if samples is not None and not (samples is Other.SUM and not trained and value.tensor.dim() == 0):
            self._values[value] = Batched(samples, trained)

    def _results(
        self, operation: Operation, call: OpCall, given: list[Shard | Other | None]
    ) -> list[Shard | Other | None] | None:
        """Where the samples lie in the results; None if the op mixes them."""
        rule = rule_for(call.target)
        _ignore_unread(rule, call, given)
        if all(samples is None for samples in given):
            return [None] * len(call.outputs)
        if _is_batch_statistic(call):
            return None
        if Other.UNKNOWN in given or rule is None:
            return [Other.UNKNOWN] * len(call.outputs)
        if Other.SUM in given:
            return _of_sums(rule, call, given)
        found = _of_samples(rule, call, given)
        if found is None and (_picks(call) or not _computes(operation)):
            return _picked(operation, call, given)
        return found


def _ignore_unread(rule: Rule | None, call: OpCall, given: list[Shard | Other | None]) -> None:
    """Forget of operands that give no more than a dtype and a device."""
    notation = rule.einsum_of(call) if isinstance(rule, EinsumRule) else None
    for index, pattern in enumerate(notation.inputs if notation is not None else ()):
        if pattern is None:
            given[index] = None


_AFFINE = (aten.add.Tensor, aten.sub.Tensor, aten._to_copy.default)
"""These may add what is no sum, or round: the mean of what they give is that of a whole batch all the same."""


def _of_sums(rule: Rule, call: OpCall, given: Sequence[Shard | Other | None]) -> list[Shard | Other | None] | None:
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


def _of_samples(rule: Rule, call: OpCall, given: Sequence[Shard | Other | None]) -> list[Shard | Other | None] | None:
    """Where the samples are in the results if every sample can be treated by itself."""
    index, shard = next((index, samples) for index, samples in enumerate(given) if isinstance(samples, Shard))
    strategy = rule.extend(call, Operand("input", index), shard)
    if strategy is None:
        return None
    if any(samples not in (None, need) for samples, need in zip(given, strategy.inputs, strict=True)):
        return None
    found: list[Shard | Other | None] = []
    for placement in strategy.outputs:
        if isinstance(placement, Partial) and placement.op != "sum":
            return None
        found.append(
            Other.SUM if isinstance(placement, Partial) else placement if isinstance(placement, Shard) else None
        )
    return found


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


def _picks(call: OpCall) -> bool:
    return call.target in _PICKING


def _computes(operation: Operation) -> bool:
    """Whether it computes with numbers, rather than with positions and conditions: these are sorted and counted."""
    return any(value.tensor.is_floating_point() for value in operation.operands)


def _picked(operation: Operation, call: OpCall, given: Sequence[Shard | Other | None]) -> list[Shard | Other | None]:
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
