"""Gather a value when a matmul is to take it, and not before what can be computed on every rank's piece for itself."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx

from fxpar._torch import c10d_functional
from fxpar.annotate import Move, known_value, layout_of, move, set_move, take_place, tensor
from fxpar.layout import REPLICATE
from fxpar.passes.around_collectives import wait_of
from fxpar.passes.cut import closure, operands
from fxpar.passes.digits import Digit, Dims, joined, rearranges, sizes, through, whole
from fxpar.passes.extract import append_after_operands, reordered
from fxpar.passes.local_graph import GraphWriter, WriterInPlace
from fxpar.passes.matmuls import matmul_at
from fxpar.passes.rearrange import laid_out_like, rearrange
from fxpar.rules.call import argument, op_call

aten = torch.ops.aten

_RANK = -1
"""The dim, in digits, that says from whose piece something comes; others are those of a piece."""


def delay_gathers(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in which all-gathers stand behind what is computed of them alone before a matmul takes it.

    Those are casts, pointwise ops, sums over other dims, and norms: every rank then computes its own piece. They are
    left in front of what sends more bytes, and of what is used elsewhere before the matmul.

    Before: `gathered = all_gather(x); wait = wait_tensor(gathered); cast = _to_copy(wait); mm = mm(cast, w)`
    After:  `cast = _to_copy(x); gathered = all_gather(cast); wait = wait_tensor(gathered); mm = mm(wait, w)`
    """
    delayed = reordered(module, module.graph.nodes)
    changed = False
    for start in [node for node in delayed.graph.nodes if _is_gather(node)]:
        changed |= _delay(start)
    if not changed:
        return module
    ordered: dict[fx.Node, None] = {}
    for node in delayed.graph.nodes:
        append_after_operands(node, ordered)
    return reordered(delayed, ordered)


def _is_gather(node: fx.Node) -> bool:
    done = move(node)
    return done is not None and done.kind == "all_gather" and wait_of(node) is not None


def _delay(start: fx.Node) -> bool:
    """Move the gather at `start` behind the ops before a matmul, if that is possible; says whether it did."""
    wait, source = wait_of(start), start.all_input_nodes[0]
    parts = start.args[1]
    assert wait is not None and isinstance(parts, int), f"{start} is waited for elsewhere"
    piece = whole(tensor(source).shape)
    rank = Digit(_RANK, 1, parts)
    done = move(start)
    assert done is not None, f"{start} is no collective"
    known = _computed_on_pieces(wait, ((rank, *piece[0]), *piece[1:]), rank, done.axis)
    for last in known:
        if _is_worth_it(last, wait, known, source, rank):
            _rewrite(start, wait, last, known, rank)
            return True
    return False


def _computed_on_pieces(wait: fx.Node, dims: Dims, rank: Digit, axis: str) -> dict[fx.Node, Dims]:
    """The nodes behind `wait` that ranks can compute on their pieces, with the dims of what they give."""
    known = {wait: dims}
    for node in list(wait.graph.nodes):
        taken = node.all_input_nodes
        if not any(operand in known for operand in taken) or node.op != "call_function":
            continue
        if all(operand in known or _is_same_on_all(operand, axis) for operand in taken):
            found = _dims_of(node, known, rank)
            if found is not None:
                known[node] = found
    return known


def _dims_of(node: fx.Node, known: Mapping[fx.Node, Dims], rank: Digit) -> Dims | None:
    """The dims of what `node` gives if its operands that are `known` are pieces; None if it cannot be computed so."""
    if rearranges(node):
        return through(node, known[node.all_input_nodes[0]])
    if node.target is operator.getitem:
        return known[node.all_input_nodes[0]] if node.args[1] == 0 else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in _REDUCTIONS:
        return _reduced(node, known, rank)
    if node.target is aten.native_layer_norm.default:
        return _normalized(node, known, rank)
    is_pointwise = torch.Tag.pointwise in node.target.tags or node.target is aten._to_copy.default
    if not is_pointwise or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    return _broadcast(node, known, rank)


_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}


def _reduced(node: fx.Node, known: Mapping[fx.Node, Dims], rank: Digit) -> Dims | None:
    (operand,), call = node.all_input_nodes, op_call(node)
    dims = known[operand]
    given = argument(call, "dim")
    gone = {dim % len(dims) for dim in ([given] if isinstance(given, int) else given or range(len(dims)))}
    if any(rank in dims[dim] for dim in gone):
        return None
    if argument(call, "keepdim"):
        return tuple(() if dim in gone else digits for dim, digits in enumerate(dims))
    return tuple(digits for dim, digits in enumerate(dims) if dim not in gone)


def _normalized(node: fx.Node, known: Mapping[fx.Node, Dims], rank: Digit) -> Dims | None:
    """A norm of which the mean and the deviation are not used."""
    operand = node.args[0]
    others_known = any(other in known for other in node.all_input_nodes if other is not operand)
    if not isinstance(operand, fx.Node) or operand not in known or others_known:
        return None
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return None
    width = len(argument(op_call(node), "normalized_shape"))
    return None if any(rank in digits for digits in known[operand][-width:]) else known[operand]


def _broadcast(node: fx.Node, known: Mapping[fx.Node, Dims], rank: Digit) -> Dims | None:
    """All operands must agree in the dims that they have, and others must be the same for all pieces."""
    found = known_value(node)
    if not isinstance(found, Tensor):
        return None
    result: list[tuple[Digit, ...]] = [()] * found.dim()
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


def _aligned(operand: Tensor, dims: Sequence[tuple[Digit, ...]]) -> Iterable[tuple[int, tuple[Digit, ...]]]:
    """The sizes of an operand beside the dims that they are broadcast to."""
    return zip(reversed(operand.shape), reversed(dims), strict=False)


def _is_same_on_all(node: fx.Node, axis: str) -> bool:
    """Whether all ranks along `axis` have the same value of `node`. Over z, they have different parts of the batch."""
    layout = layout_of(node)
    return axis in ("y", "x") and layout is not None and layout.placement(axis) == REPLICATE


def _is_worth_it(last: fx.Node, wait: fx.Node, known: Mapping[fx.Node, Dims], source: fx.Node, rank: Digit) -> bool:
    """Whether a matmul takes `last`, computed of the gathered value, and nothing else takes any of that on the way."""
    if rearranges(last) or last is wait or not isinstance(known_value(last), Tensor) or not _feeds_a_matmul(last):
        return False
    digits = [digit for of_dim in known[last] for digit in of_dim]
    num_bytes = tensor(last).nbytes // rank.size
    if digits.count(rank) != 1 or num_bytes > tensor(source).nbytes:
        return False
    inside = _between(last, known)
    return wait in inside and all(user in inside for node in inside if node is not last for user in node.users)


def _feeds_a_matmul(node: fx.Node) -> bool:
    return any(matmul_at(user) is not None or (rearranges(user) and _feeds_a_matmul(user)) for user in node.users)


def _between(last: fx.Node, known: Mapping[fx.Node, Dims]) -> set[fx.Node]:
    """The nodes that lead from the gathered value to `last`, both included."""
    return {node for node in closure([last], operands) if node in known}


def _rewrite(start: fx.Node, wait: fx.Node, last: fx.Node, known: Mapping[fx.Node, Dims], rank: Digit) -> None:
    graph, inside = start.graph, _between(last, known)
    pieces = {wait: start.all_input_nodes[0]}
    with graph.inserting_before(last):
        for node in list(graph.nodes):
            if node in inside and node is not wait:
                pieces[node] = _on_pieces(WriterInPlace(graph, node), node, pieces, known, rank)
        write = WriterInPlace(graph, last)
        gathered = _gathered(write, start, pieces[last], known[last], rank)
        gathered = laid_out_like(write, gathered, tensor(last))
    take_place(gathered, last)
    last.replace_all_uses_with(gathered)
    for node in reversed(list(graph.nodes)):
        if node in inside or node is start:
            graph.erase_node(node)


def _on_pieces(
    write: GraphWriter, node: fx.Node, pieces: Mapping[fx.Node, fx.Node], known: Mapping[fx.Node, Dims], rank: Digit
) -> fx.Node:
    """What `node` computes, of this rank's `pieces` of its operands."""
    if rearranges(node):
        (operand,) = node.all_input_nodes
        return rearrange(write, pieces[operand], _of_piece(known[operand], rank), _of_piece(known[node], rank))
    assert callable(node.target), f"{node} calls no function"
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: pieces.get(operand, operand))
    return write.call(node.target, *args, **kwargs)


def _gathered(write: GraphWriter, start: fx.Node, piece: fx.Node, dims: Dims, rank: Digit) -> fx.Node:
    """What all ranks have as `piece`, gathered as by `start`, with the `dims`."""
    done, source = move(start), write.contiguous(piece)
    assert done is not None, f"{start} is no collective"
    started = write.call(c10d_functional.all_gather_into_tensor.default, source, *start.args[1:])
    set_move(started, Move(done.kind, done.axis, tensor(started).nbytes))
    wait = write.call(c10d_functional.wait_tensor.default, started)
    stacked = write.view(wait, [rank.size, *tensor(source).shape])
    return rearrange(write, stacked, ((rank,), *_of_piece(dims, rank)), dims)


def _of_piece(dims: Dims, rank: Digit) -> Dims:
    """The dims of a rank's piece of what has `dims`."""
    return tuple(joined(digit for digit in digits if digit != rank) for digits in dims)
