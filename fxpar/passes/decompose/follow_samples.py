"""Follow the samples of a batch through the stages of a forward, to its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxpar.costs.dataflow import Border, Operation, Value
from fxpar.graph.extract import returned
from fxpar.graph.min_cut import closure, operands, users
from fxpar.ir.batch_totals import BatchTotals
from fxpar.ir.capture import Capture
from fxpar.ir.samples import Reduced, Samples
from fxpar.ir.stage import JointGraph, Port
from fxpar.passes.decompose.sample_positions import samples_after_mixing, samples_of_results
from fxpar.passes.decompose.two_samples import OneSampleError, operations_to_follow, samples_of_input


@dataclass(frozen=True, slots=True)
class Followed:
    """Where samples are in each of the outputs of stages that depend on them.

    mixing: the first op that combines samples other than by a sum, or that is no linear function of sums.
    """

    outputs: Mapping[Port, Samples]
    mixing: fx.Node | None


def follow_samples(
    stages: Sequence[JointGraph],
    batch_dims: Mapping[Port, int],
    num_samples: int,
    wanted: Collection[Port],
    *,
    means_are_whole: bool = False,
    counts: Collection[Port] = (),
    counts_samples: Callable[[float], bool] = lambda number: True,
) -> Followed:
    """Where the samples are in the outputs `wanted`, and which op that these depend on mixes them, if one does.

    An op mixes no samples if it can run on each by itself: if its sharding rule lets the batch dim be cut into
    `num_samples` parts. An op without a rule is assumed to mix none. Where an index picks samples, their positions are
    unknown, and no op that depends on them is found.

    Args:
        stages: the joint graphs of all stages, in order, as decomposed for sharding.
        batch_dims: the batch dim of each input that has one, of `num_samples` in a microbatch. For one sample, the
            graphs are read as they would be for two.
        means_are_whole: whether means over all batch shards, as of `SyncBatchNorm`, are those of the whole batch: if it
            comes in one microbatch.
        counts: the inputs that are numbers of the whole batch.
        counts_samples: whether a sum over samples that is divided by this number is a mean.
    """
    following = _Following(batch_dims, num_samples, means_are_whole, counts_samples)
    following.outputs |= dict.fromkeys(counts, Reduced.COUNT)
    for joint, relevant in zip(stages, _leading_to(stages, wanted), strict=True):
        following.stage(joint, relevant)
    found = {port: samples for port, samples in following.outputs.items() if samples is not Reduced.COUNT}
    return Followed(found, following.mixing)


def follow_capture(
    stages: Sequence[JointGraph], capture: Capture, wanted: Collection[Port], *, means_are_whole: bool = False
) -> Followed:
    """The result of `follow_samples` for the stages of a capture that has a batch."""
    assert capture.microbatch_size is not None, "without a batch there are no samples"
    return follow_samples(
        stages,
        capture.batch_dims,
        capture.microbatch_size,
        wanted,
        means_are_whole=means_are_whole,
        counts=() if capture.totals is None else _counts(capture.totals),
        counts_samples=capture.may_count_samples,
    )


def _counts(totals: BatchTotals) -> list[Port]:
    """The numbers of the whole batch that are computed from sums, by which the sum over a part is divided to a mean."""
    module = totals.of_batch
    num_sums = len(returned(totals.of_microbatch)) - len(totals.extremes)
    of_sums = closure(module.graph.find_nodes(op="placeholder")[:num_sums], users)
    return [port for port, node in zip(totals.results, returned(module), strict=True) if node in of_sums]


def _leading_to(stages: Sequence[JointGraph], wanted: Collection[Port]) -> list[set[fx.Node]]:
    """For each stage, the nodes on which the ports `wanted` depend."""
    ports, found = set(wanted), []
    for joint in reversed(stages):
        ends = [node for port, node in zip(joint.outputs, returned(joint.module), strict=False) if port in ports]
        needed = closure(ends, operands)
        placeholders = joint.module.graph.find_nodes(op="placeholder")
        ports |= {port for port, node in zip(joint.inputs, placeholders, strict=False) if node in needed}
        found.append(needed)
    return found[::-1]


class _Following:
    """What is known after some stages: as in `Followed`, and for one sample the outputs as they are for two."""

    def __init__(
        self,
        batch_dims: Mapping[Port, int],
        num_samples: int,
        means_are_whole: bool,
        counts_samples: Callable[[float], bool],
    ) -> None:
        self.outputs: dict[Port, Samples] = {}
        self.mixing: fx.Node | None = None
        self._batch_dims, self._means_are_whole = batch_dims, means_are_whole
        self._num_samples, self._counts_samples = num_samples, counts_samples
        self._for_two: dict[Port, Tensor] = {}

    def stage(self, joint: JointGraph, relevant: set[fx.Node]) -> None:
        """Follow the samples through the next stage, along its `relevant` nodes."""
        values: dict[Value, Samples] = {}
        given = joint, self._num_samples, self._batch_dims, relevant, values, self._for_two
        try:
            for node, operation in operations_to_follow(*given):
                if operation.border is not Border.OUTPUT:
                    values |= self._found(node, operation, values)
                elif operation.port is not None:
                    self._leave(operation.port, operation.operands[0], values)
        except OneSampleError:
            self.outputs |= dict.fromkeys(joint.outputs, Reduced.UNKNOWN)

    def _leave(self, port: Port, value: Value, values: Mapping[Value, Samples]) -> None:
        self._for_two[port] = value.tensor
        if value in values:
            self.outputs[port] = values[value]

    def _found(self, node: fx.Node, operation: Operation, values: Mapping[Value, Samples]) -> dict[Value, Samples]:
        """Where samples are in the results of an operation, which stands for `node`."""
        if operation.border is Border.INPUT:
            return self._entering(operation)
        if operation.call is None:
            return {}
        given = [values.get(value) for value in operation.operands]
        if self._means_are_whole and operation.node.target is torch.ops.fxpar.batch_mean.default:
            given = [None if isinstance(samples, Reduced) else samples for samples in given]
        found = samples_of_results(operation, operation.call, given, self._counts_samples)
        if (found is None or Reduced.MAX in found) and self.mixing is None:
            self.mixing = node
        found = found or samples_after_mixing(operation.call, given)
        pairs = zip(operation.results, found, strict=True)
        return {value: samples for value, samples in pairs if value is not None and samples is not None}

    def _entering(self, operation: Operation) -> dict[Value, Samples]:
        port, (value,) = operation.port, operation.values
        assert port is not None, "an input has a port"
        if port in self.outputs:
            return {value: self.outputs[port]}
        if port not in self._batch_dims:
            return {}
        return {value: samples_of_input(value, self._batch_dims[port], self._num_samples)}
