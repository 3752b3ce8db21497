"""Find ops that mix the samples of a batch, so that their results depend on how the batch is divided."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpar.costs.dataflow import Border, Operation, Value, operations
from fxpar.environment import is_first_rank
from fxpar.graph.min_cut import closure, operands
from fxpar.ir.capture import Capture
from fxpar.ir.layout import Shard
from fxpar.ir.node_meta import where
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.decompose.sample_positions import Other, Samples, samples_of_results
from fxpar.world.mesh import num_batch_shards


@dataclass(frozen=True, slots=True)
class Batched:
    """A value that depends on the batch: where its samples are, and whether it depends on parameters as well."""

    samples: Samples
    trained: bool


def warn_of_batch_mixing(stages: Sequence[JointGraph], capture: Capture, distribution: Distribution) -> None:
    """Warn once, if the batch is divided, of an op that makes the loss depend on how it is."""
    microbatches, num_shards = distribution.microbatches_of(capture), num_batch_shards(distribution.mesh)
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
    node = find_batch_mixing(stages, capture.batch_dims, num_samples, wanted, means_are_whole=microbatches == 1)
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
    stages: Sequence[JointGraph],
    batch_dims: Mapping[Port, int],
    num_samples: int,
    wanted: Collection[Port],
    *,
    means_are_whole: bool = False,
) -> fx.Node | None:
    """The first op that the outputs `wanted` depend on and that combines samples, other than to sum them up to a loss.

    Examples are a matrix product of samples with each other, a softmax over the batch, and the statistics of a norm
    over the batch. A loss may be the sum or the mean over samples, or a linear function of these, and may be divided by
    a value that depends on no parameter: `total_over_batch` makes it that of the whole batch.

    An op mixes no samples if it can run on each by itself: if its sharding rule lets the batch dim be cut into
    `num_samples` parts. An op without a rule is assumed to mix none. Where an index picks samples, their positions are
    unknown, and no op that depends on them is found.

    Args:
        stages: the joint graphs of all stages, in order, as decomposed for sharding.
        batch_dims: the batch dim of each input that has one, of `num_samples` in a microbatch. With one sample in each,
            nothing is found.
        means_are_whole: whether means over all batch shards, as of `SyncBatchNorm`, are those of the whole batch: if it
            comes in one microbatch.
    """
    if num_samples == 1:  # rules do not tell where a dim of size 1 goes
        return None
    programs = [operations(joint) for joint in stages]
    known: dict[Port, Batched] = {}
    for program, relevant in zip(programs, _leading_to(programs, wanted), strict=True):
        tracker = _Tracker(known, batch_dims, num_samples, means_are_whole)
        for operation in program:
            if operation.node in relevant and tracker.mixes(operation):
                return operation.node
        tracker.leave(program)
    return None


def _leading_to(programs: Sequence[Sequence[Operation]], wanted: Collection[Port]) -> list[set[fx.Node]]:
    """For each stage, the nodes on which the ports `wanted` depend."""
    ports, found = set(wanted), []
    for program in reversed(programs):
        ends = [op.operands[0].node for op in program if op.border is Border.OUTPUT and op.port in ports]
        needed = closure(ends, operands)
        ports |= {op.port for op in program if op.border is Border.INPUT and op.port and op.node in needed}
        found.append(needed)
    return found[::-1]


class _Tracker:
    """Finds where the samples are in the values of one stage; `known` has them for edges."""

    def __init__(
        self, known: dict[Port, Batched], batch_dims: Mapping[Port, int], num_samples: int, means_are_whole: bool
    ) -> None:
        self._known, self._batch_dims, self._num_samples = known, batch_dims, num_samples
        self._means_are_whole = means_are_whole
        self._values: dict[Value, Batched] = {}
        self._trained: set[Value] = set()

    def mixes(self, operation: Operation) -> bool:
        """Whether the op combines samples; if it does not, where they are in its results is recorded."""
        if operation.border is Border.INPUT:
            self._enter(operation)
        if operation.call is None:
            return False
        trained = any(value in self._trained for value in operation.operands)
        states = [self._values.get(value) for value in operation.operands]
        given = [None if state is None else state.samples for state in states]
        if self._means_are_whole and operation.node.target is torch.ops.fxpar.batch_mean.default:
            given = [None if samples is Other.SUM else samples for samples in given]
        found = samples_of_results(operation, operation.call, given)
        if found is None:
            return True
        for value, samples in zip(operation.results, found, strict=True):
            if value is not None:
                self._note(value, samples, trained)
        return False

    def leave(self, program: Sequence[Operation]) -> None:
        """Record where samples are in the edges to later stages."""
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

    def _note(self, value: Value, samples: Samples | None, trained: bool) -> None:
        if trained:
            self._trained.add(value)
        # A scalar sum over the batch that depends on no parameter, such as a count of tokens, counts as a constant.
        if samples is not None and not (samples is Other.SUM and not trained and value.tensor.dim() == 0):
            self._values[value] = Batched(samples, trained)
