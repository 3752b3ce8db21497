"""Find sums over the samples of a batch, and what is computed from them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from fxpar.costs.dataflow import Border, Operation, Value, operations
from fxpar.ir.layout import Shard
from fxpar.ir.node_meta import value
from fxpar.ir.op_predicates import is_random
from fxpar.ir.stage import JointGraph, Port
from fxpar.passes.decompose.sample_positions import Other, Samples, samples_of_results
from fxpar.passes.decompose.two_samples import for_two_samples


@dataclass(frozen=True, slots=True)
class WholeValues:
    """Nodes of a graph: `sums` over samples, and the values that are computed from them and from constants alone."""

    sums: Sequence[fx.Node]
    derived: frozenset[fx.Node]


NONE_FOUND = WholeValues((), frozenset())


def find_whole_values(joint: JointGraph, batch_dims: Mapping[Port, int], num_samples: int) -> WholeValues:
    """The sums over samples in a graph that is decomposed for sharding, and what depends on nothing else of the batch.

    Args:
        batch_dims: the batch dim of each input that has one, of `num_samples` samples.
    """
    if num_samples > 1:
        return _Search(batch_dims, num_samples).run(joint)
    try:
        longer, copies = for_two_samples(joint, batch_dims)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return NONE_FOUND
    found = _Search(batch_dims, 2).run(longer)
    sums = [node for node, copy in copies.items() if copy in found.sums]
    return WholeValues(sums, frozenset(node for node, copy in copies.items() if copy in found.derived))


class _Search:
    """Where samples are in the values that depend on them otherwise than by way of sums."""

    def __init__(self, batch_dims: Mapping[Port, int], num_samples: int) -> None:
        self._batch_dims, self._num_samples = batch_dims, num_samples
        self._samples: dict[Value, Samples] = {}
        self._sums: list[fx.Node] = []
        self._derived: set[fx.Node] = set()

    def run(self, joint: JointGraph) -> WholeValues:
        for operation in operations(joint):
            if operation.border is Border.INPUT and operation.port is not None:
                self._enter(operation, self._batch_dims.get(operation.port))
            elif operation.call is not None:
                self._follow(operation)
        return WholeValues(self._sums, frozenset(self._derived))

    def _enter(self, operation: Operation, dim: int | None) -> None:
        if dim is None:
            return
        (entering,) = operation.values
        shard = Shard(dim, self._num_samples)
        self._samples[entering] = shard if shard.fits(entering.tensor.shape[dim]) else Other.UNKNOWN

    def _follow(self, operation: Operation) -> None:
        assert operation.call is not None
        given = [self._samples.get(operand) for operand in operation.operands]
        of_samples = any(samples is not None for samples in given)
        of_sums = any(operand.node in self._derived for operand in operation.operands)
        if is_random(operation.node.target) or (of_samples and of_sums):
            self._note(operation, [Other.UNKNOWN] * len(operation.results))
        elif of_samples:
            found = samples_of_results(operation, operation.call, given)
            self._note(operation, found or [Other.UNKNOWN] * len(operation.results))
        elif of_sums:
            self._derived.add(operation.node)

    def _note(self, operation: Operation, found: Sequence[Samples | None]) -> None:
        if list(found) == [Other.SUM] and isinstance(value(operation.node), Tensor):
            self._sums.append(operation.node)
            self._derived.add(operation.node)
            return
        for result, samples in zip(operation.results, found, strict=True):
            if result is not None and samples is not None:
                self._samples[result] = Other.UNKNOWN if samples is Other.SUM else samples
