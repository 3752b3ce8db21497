"""Find ops on a gathered value that could run on every rank's piece before the all-gather."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxpar.graph.dim_map import Dims, SourceDigit, joined, rearranges, sizes, through
from fxpar.graph.graph_writer import GraphWriter
from fxpar.graph.min_cut import closure, operands
from fxpar.graph.view_ops import rearrange
from fxpar.ir.layout import REPLICATE
from fxpar.ir.node_meta import communication, known_value, layout_of, tensor
from fxpar.ir.op_predicates import is_pointwise, is_random
from fxpar.rules.call import argument, op_call

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SunkGather:
    """The `ops` after an all-gather that each rank could run on its piece before it, in order.

    `dims` has, for each op and the wait before them, the digits of its result; `rank` is the digit that numbers the
    rank that a piece comes from.
    """

    ops: tuple[fx.Node, ...]
    dims: Mapping[fx.Node, Dims]
    rank: SourceDigit

    @property
    def last(self) -> fx.Node:
        """The op whose result would be gathered instead."""
        return self.ops[-1]


def find_sunk_gather(start: fx.Node, wait: fx.Node, dims: Dims, rank: SourceDigit) -> Iterator[SunkGather]:
    """Values that could be gathered instead of the operand of `start`, with no more bytes.

    The ops that lead to such a value have no other users. Casts, pointwise ops, sums over other dims and norms can run
    on pieces, if their other operands are the same on all ranks.
    """
    known = _computed_on_pieces(start, wait, dims, rank)
    for last in known:
        if rearranges(last) or last is wait or not isinstance(known_value(last), Tensor):
            continue
        times_gathered = sum(digits.count(rank) for digits in known[last])
        if times_gathered != 1 or tensor(last).nbytes // rank.size > tensor(start.all_input_nodes[0]).nbytes:
            continue
        needed = closure([last], operands)
        ops = tuple(node for node in known if node in needed and node is not wait)
        if all(user in ops for node in (wait, *ops[:-1]) for user in node.users):
            yield SunkGather(ops, {node: known[node] for node in (wait, *ops)}, rank)


def write_on_pieces(write: GraphWriter, found: SunkGather, wait: fx.Node, piece: fx.Node) -> fx.Node:
    """Write the ops on this rank's `piece` of the value at `wait`; returns its piece of their last result."""
    pieces = {wait: piece}
    for node in found.ops:
        if rearranges(node):
            (operand,) = node.all_input_nodes
            have, want = (of_piece(found.dims[each], found.rank) for each in (operand, node))
            pieces[node] = rearrange(write, pieces[operand], have, want)
            continue
        assert callable(node.target), f"{node} calls no function"
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda taken: pieces.get(taken, taken))
        pieces[node] = write.call(node.target, *args, **kwargs)
    return pieces[found.last]


def of_piece(dims: Dims, rank: SourceDigit) -> Dims:
    """The dims of a rank's piece of a value of `dims`."""
    return tuple(joined(digit for digit in digits if digit != rank) for digits in dims)


def _computed_on_pieces(start: fx.Node, wait: fx.Node, dims: Dims, rank: SourceDigit) -> dict[fx.Node, Dims]:
    """The nodes after `wait` that ranks can compute on their pieces, in order, with the dims of their results."""
    done = communication(start)
    assert done is not None, f"{start} is no collective"
    known = {wait: dims}
    behind = closure([wait], lambda node: node.users)
    for node in wait.graph.nodes:
        taken = node.all_input_nodes
        if node not in behind or node.op != "call_function" or not any(operand in known for operand in taken):
            continue
        if all(operand in known or _is_same_on_all(operand, done.axis) for operand in taken):
            found = _dims_of(node, known, rank)
            if found is not None:
                known[node] = found
    return known


def _is_same_on_all(node: fx.Node, axis: str) -> bool:
    """Whether all ranks along `axis` have the same value of `node`. Over z, they have different parts of the batch."""
    layout = layout_of(node)
    return axis in ("y", "x") and layout is not None and layout.placement(axis) == REPLICATE


_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}


def _dims_of(node: fx.Node, known: Mapping[fx.Node, Dims], rank: SourceDigit) -> Dims | None:
    """The dims of the result of `node` if it runs on pieces of its `known` operands; None if it cannot."""
    if rearranges(node):
        return through(node, known[node.all_input_nodes[0]])
    if node.target is operator.getitem:
        return known[node.all_input_nodes[0]] if node.args[1] == 0 else None
    if node.target in _REDUCTIONS:
        return _reduced(node, known, rank)
    if node.target is aten.native_layer_norm.default:
        return _normalized(node, known, rank)
    maps_elements = is_pointwise(node.target) or node.target is aten._to_copy.default
    if not maps_elements or is_random(node.target):
        return None
    return _broadcast(node, known, rank)


def _reduced(node: fx.Node, known: Mapping[fx.Node, Dims], rank: SourceDigit) -> Dims | None:
    (operand,), call = node.all_input_nodes, op_call(node)
    dims, given = known[operand], argument(call, "dim")
    gone = {dim % len(dims) for dim in ([given] if isinstance(given, int) else given or range(len(dims)))}
    if any(rank in dims[dim] for dim in gone):
        return None
    if argument(call, "keepdim"):
        return tuple(() if dim in gone else digits for dim, digits in enumerate(dims))
    return tuple(digits for dim, digits in enumerate(dims) if dim not in gone)


def _normalized(node: fx.Node, known: Mapping[fx.Node, Dims], rank: SourceDigit) -> Dims | None:
    """A layer norm whose mean and deviation are not used, over dims that every piece has whole."""
    operand, *others = node.all_input_nodes
    if operand not in known or any(other in known for other in others):
        return None
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return None
    width = len(argument(op_call(node), "normalized_shape"))
    return None if any(rank in digits for digits in known[operand][-width:]) else known[operand]


def _broadcast(node: fx.Node, known: Mapping[fx.Node, Dims], rank: SourceDigit) -> Dims | None:
    """Pieces must agree in the dims that they have, and other operands must be the same for all pieces."""
    found = known_value(node)
    if not isinstance(found, Tensor):
        return None
    result: list[tuple[SourceDigit, ...]] = [()] * found.dim()
    for operand in node.all_input_nodes:
        for back, digits in enumerate(reversed(known.get(operand, ())), start=1):
            if digits and result[-back] not in ((), digits):
                return None
            result[-back] = digits or result[-back]
    if sizes(tuple(result)) != list(found.shape):
        return None
    others = [tensor(operand) for operand in node.all_input_nodes if operand not in known]
    differ = any(size != 1 and rank in digits for other in others for size, digits in _aligned(other, result))
    return None if differ else tuple(result)


def _aligned(operand: Tensor, dims: Sequence[tuple[SourceDigit, ...]]) -> Iterable[tuple[int, tuple[SourceDigit, ...]]]:
    """The sizes of an operand's dims, each with the dim that it is broadcast to."""
    return zip(reversed(operand.shape), reversed(dims), strict=False)
