"""Read the operations of a graph to follow samples; one that was traced for one sample as it would be for two."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar.costs.dataflow import Border, Operation, Value, operation_of_call, operations, producer
from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.layout import Shard
from fxpar.ir.node_meta import known_value, set_value, tensor
from fxpar.ir.samples import Reduced, Samples
from fxpar.ir.stage import JointGraph, Port

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class OneSampleError(Exception):
    """An op takes no operands as they are for two samples."""


def operations_to_follow(
    joint: JointGraph,
    num_samples: int,
    batch_dims: Mapping[Port, int],
    wanted: Set[fx.Node],
    samples: Mapping[Value, Samples],
    edges_for_two: Mapping[Port, Tensor],
) -> Iterable[tuple[fx.Node, Operation]]:
    """The operations at the nodes `wanted`, and the outputs, with the nodes; of one sample as `operations_for_two`."""
    if num_samples == 1:
        longer = {**inputs_for_two(joint, batch_dims), **edges_for_two}
        return operations_for_two(joint, longer, wanted, samples)
    return [(op.node, op) for op in operations(joint) if op.node in wanted or op.border is Border.OUTPUT]


def samples_of_input(value: Value, dim: int, num_samples: int) -> Samples:
    """Where samples are in an input with a batch dim, as `operations_to_follow` has it."""
    shard = Shard(dim, max(num_samples, 2))
    return shard if shard.fits(value.tensor.shape[dim]) else Reduced.UNKNOWN


def operations_for_two(
    joint: JointGraph, longer: Mapping[Port, Tensor], wanted: Set[fx.Node], samples: Mapping[Value, Samples]
) -> Iterator[tuple[fx.Node, Operation]]:
    """The operations of a graph at the nodes `wanted`, and its outputs, on inputs for two samples; with the nodes.

    In a batch of one sample nothing tells its dim from others of size 1. Sizes that the trace has noted in views are
    adapted; where dims of size 1 are side by side, the batch is the first. The operations are to be read: a view among
    them may need a copy.

    Args:
        longer: the values of the inputs that are longer.
        samples: where samples are in the values of the operations so far, whenever the next one is asked for.

    Raises:
        OneSampleError: an op takes no operands of the new sizes.
    """
    copying = _Copying(samples)
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    ports = dict(zip(placeholders, joint.inputs, strict=False))
    for node in joint.module.graph.nodes:
        if node.op == "output":
            for port, leaving in zip(joint.outputs, node.args[0], strict=False):
                if leaving in wanted:
                    given = producer(copying.copies[leaving])
                    yield node, Operation(node, (given,), (), border=Border.OUTPUT, port=port)
        elif node in wanted:
            copy = copying.copy(node, longer.get(ports[node]) if node in ports else None)
            if node in ports:
                yield node, Operation(copy, (), (Value(copy),), border=Border.INPUT, port=ports[node])
            elif node.op == "call_function" and node.target is not operator.getitem:
                yield node, operation_of_call(copy)


def inputs_for_two(joint: JointGraph, batch_dims: Mapping[Port, int]) -> dict[Port, Tensor]:
    """The inputs of a graph for one sample that have a batch dim, as they are for two."""
    ports = zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=False)
    with fake_mode_of(joint.module.graph):
        return {port: _twice_as_long(tensor(node), batch_dims[port]) for port, node in ports if port in batch_dims}


def _twice_as_long(value: Tensor, dim: int) -> Tensor:
    shape = list(value.shape)
    shape[dim] *= 2
    return value.new_empty(shape)


class _Copying:
    """Makes copies of nodes, with the values that they have for two samples."""

    def __init__(self, samples: Mapping[Value, Samples]) -> None:
        self.copies: dict[fx.Node, fx.Node] = {}
        self._samples = samples
        self._graph = ConcreteGraph()

    def copy(self, node: fx.Node, value: Tensor | None) -> fx.Node:
        """A copy of `node`, whose value is `value`, if it is longer for two samples and not computed."""
        copy = self.copies[node] = self._graph.node_copy(node, self.copies.__getitem__)
        if value is not None:
            set_value(copy, value)
        elif callable(copy.target):
            try:
                with fake_mode_of(self._graph), _without_log():
                    set_value(copy, self._value(node, copy, copy.target))
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise OneSampleError(node.name) from error
        return copy

    def _value(self, node: fx.Node, copy: fx.Node, target: Callable[..., Any]) -> Any:
        """What `copy` of `node` returns; the sizes among the arguments of views and expansions are adapted."""
        place = self._place(node, copy) if node.target in (*_VIEWS, aten.expand.default) else None
        if place is not None:
            before, dim, outer = place
            sizes = list(tensor(node).shape)
            if node.target is aten.expand.default:
                sizes[dim - len(before)] = -1
            else:
                sizes[_dim_of_batch(sizes, math.prod(before[:dim]) * outer, before[dim + 1 :])] *= 2
            copy.update_arg(1, sizes)
        given: Any = fx.node.map_arg((copy.args, copy.kwargs), known_value)
        args, kwargs = given
        if node.target in _VIEWS:  # rows that one sample has in a row may be apart for two
            return args[0].reshape(args[1])
        return target(*args, **kwargs)

    def _place(self, node: fx.Node, copy: fx.Node) -> tuple[torch.Size, int, int] | None:
        """The shape of the operand for one sample, the dim in which it is longer for two, and how often that is so."""
        (one,), (two,) = node.all_input_nodes, copy.all_input_nodes
        before = tensor(one).shape
        grown = [dim for dim, (old, new) in enumerate(zip(before, tensor(two).shape, strict=True)) if old != new]
        if not grown:
            return None
        found = self._samples.get(producer(two))
        return before, grown[0], found.outer if isinstance(found, Shard) and found.dim == grown[0] else 1


def _dim_of_batch(sizes: Sequence[int], num_before: int, after: Sequence[int]) -> int:
    """The dim of a view that a batch is in, or becomes part of, which was after `num_before` values, before `after`."""
    found = 1
    for dim, size in enumerate(sizes):
        if found == num_before and size == 1:
            return dim
        if found * size > num_before or (found * size == num_before and tuple(sizes[dim + 1 :]) == tuple(after)):
            return dim
        found *= size
    return len(sizes) - 1


@contextmanager
def _without_log() -> Iterator[None]:
    """Within, PyTorch does not log that an op takes no operands of some sizes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
