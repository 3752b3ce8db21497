"""Find sums, and largest and smallest values, over the samples of a batch, and what is computed from them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.costs.dataflow import Border, Operation, Value
from fxpar.ir.batch_totals import Extreme
from fxpar.ir.layout import Shard
from fxpar.ir.node_meta import value
from fxpar.ir.op_predicates import is_random
from fxpar.ir.samples import Reduced, Samples
from fxpar.ir.stage import JointGraph, Port
from fxpar.passes.decompose.sample_positions import samples_of_results
from fxpar.passes.decompose.two_samples import OneSampleError, operations_to_follow, samples_of_input

aten = torch.ops.aten

_EXTREMES: Mapping[Any, Extreme] = {
    **dict.fromkeys((aten.max.default, aten.amax.default, aten.any.default, aten.any.dim, aten.any.dims), "max"),
    **dict.fromkeys((aten.min.default, aten.amin.default, aten.all.default, aten.all.dim, aten.all.dims), "min"),
}
"""Of booleans, any is the largest and all the smallest."""


@dataclass(frozen=True, slots=True)
class WholeValues:
    """Nodes of a graph.

    sums: those over samples.
    extremes: the largest or smallest values over samples, and which of both.
    derived: the values that are computed from these and from constants alone.
    """

    sums: Sequence[fx.Node]
    extremes: Mapping[fx.Node, Extreme]
    derived: frozenset[fx.Node]


def find_whole_values(joint: JointGraph, batch_dims: Mapping[Port, int], num_samples: int) -> WholeValues:
    """The sums and extremes over samples in a graph that is decomposed for sharding, and what depends on them alone.

    Args:
        batch_dims: the batch dim of each input that has one, of `num_samples` samples.
    """
    search = _Search(batch_dims, num_samples)
    try:
        return search.run(joint)
    except OneSampleError:
        return WholeValues((), {}, frozenset())


class _Search:
    """Where samples are in the values that depend on them otherwise than by way of sums."""

    def __init__(self, batch_dims: Mapping[Port, int], num_samples: int) -> None:
        self._batch_dims, self._num_samples = batch_dims, num_samples
        self._samples: dict[Value, Samples] = {}
        self._sums: list[fx.Node] = []
        self._extremes: dict[fx.Node, Extreme] = {}
        self._derived: set[Value] = set()

    def run(self, joint: JointGraph) -> WholeValues:
        derived, everything = set(), {*joint.module.graph.nodes}
        given = joint, self._num_samples, self._batch_dims, everything, self._samples
        for node, operation in operations_to_follow(*given, edges_for_two={}):
            if operation.border is Border.INPUT:
                self._enter(operation)
            elif operation.call is not None:
                self._follow(node, operation)
            if any(value in self._derived for value in operation.results):
                derived.add(node)
        return WholeValues(self._sums, self._extremes, frozenset(derived))

    def _enter(self, operation: Operation) -> None:
        assert operation.port is not None, "an input has a port"
        dim = self._batch_dims.get(operation.port)
        if dim is not None:
            (entering,) = operation.values
            self._samples[entering] = samples_of_input(entering, dim, self._num_samples)

    def _follow(self, node: fx.Node, operation: Operation) -> None:
        assert operation.call is not None
        given = [self._samples.get(operand) for operand in operation.operands]
        of_samples = any(samples is not None for samples in given)
        of_sums = any(operand in self._derived for operand in operation.operands)
        if is_random(operation.node.target) or (of_samples and of_sums):
            self._note(node, operation, None)
        elif (extreme := _extreme_of_samples(operation, given)) is not None:
            self._extremes[node] = extreme
            self._derived.add(Value(operation.node))
        elif of_samples:
            self._note(node, operation, samples_of_results(operation, operation.call, given))
        elif of_sums:
            self._derived.update(result for result in operation.results if result is not None)

    def _note(self, node: fx.Node, operation: Operation, found: Sequence[Samples | None] | None) -> None:
        if found == [Reduced.SUM] and isinstance(value(node), Tensor):
            self._sums.append(node)
            self._derived.add(Value(operation.node))
            return
        for result, samples in zip(operation.results, found or [Reduced.UNKNOWN] * len(operation.results), strict=True):
            if result is not None and samples is not None:
                self._samples[result] = Reduced.UNKNOWN if isinstance(samples, Reduced) else samples


def _extreme_of_samples(operation: Operation, given: Sequence[Samples | None]) -> Extreme | None:
    """Which extreme over all samples the operation returns; None if it returns another value."""
    extreme, call = _EXTREMES.get(operation.node.target), operation.call
    samples = given[0] if given else None
    if extreme is None or call is None or not isinstance(samples, Shard):
        return None
    dims = call.args[1] if len(call.args) > 1 else ()
    dims = dims if isinstance(dims, list | tuple) else [dims]
    assert call.inputs[0] is not None, "samples are in a tensor"
    is_reduced = not dims or samples.dim in [dim % len(call.inputs[0]) for dim in dims]
    return extreme if is_reduced else None
