"""Run the local graphs of all ranks in one process: each up to its next collective, which is then done directly."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxpar.ir import fused_ops
from fxpar.ir.node_meta import Communication, communication, fused
from fxpar.world.mesh import Mesh


class _Request(NamedTuple):
    """A rank's call of a collective; `reduce_op` means something for reductions alone."""

    does: Communication
    sent: Tensor
    reduce_op: Any


_Steps = Generator[_Request, Tensor, Any]


def run_ranks_in_lockstep(graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Any]], mesh: Mesh) -> list[Any]:
    """The results of each rank's graph for its inputs. All ranks must reach the same collectives in the same order."""
    ranks = [_run(graph, given) for graph, given in zip(graphs, inputs, strict=True)]
    results: list[Any] = [None] * len(ranks)
    requests = {rank: _advance(steps, None, results, rank) for rank, steps in enumerate(ranks)}
    while any(request is not None for request in requests.values()):
        reached = {request and (request.does.kind, request.does.axis) for request in requests.values()}
        assert len(reached) == 1, f"the ranks' programs differ: {reached}"
        received = _communicate({rank: request for rank, request in requests.items() if request}, mesh)
        requests = {rank: _advance(ranks[rank], received[rank], results, rank) for rank in requests}
    return results


def _run(graph: fx.Graph, inputs: Sequence[Any]) -> _Steps:
    """Run `graph`, handing every collective to the caller with the tensor that goes into it."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(graph.owning_module, node.target)
        elif node.op == "output":
            return args[0]
        elif (done := communication(node)) is not None:
            values[node] = yield _Request(done, args[0], args[1])
        elif (within := fused(node)) is not None:
            values[node] = yield from _run_fused(node, within, args)
        elif node.target is torch.ops._c10d_functional.wait_tensor.default:
            values[node] = args[0]
        else:
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("the graph has no output")


def _run_fused(node: fx.Node, within: Communication, args: Sequence[Any]) -> _Steps:
    """Run a fused op as its schema says it: a collective before its matmuls, or behind its matmul."""
    if node.target is torch.ops.fxpar.all_gather_matmul.default:
        shard, others, biases, form, outer, parts, keeps_gathered, _ = args
        pieces = (yield _Request(within, shard.contiguous(), None)).unflatten(0, (parts, -1))
        return fused_ops.products_of_pieces(pieces, others, biases, form, outer, keeps_gathered)
    if node.target is torch.ops.fxpar.matmul_all_reduce.default:
        return (yield _Request(within, fused_ops.product(*args[:3]), "sum"))
    return (yield _Request(within, fused_ops.pieces_of_product(*args[:-1]).flatten(0, 1), "sum"))


def _advance(steps: _Steps, received: Tensor | None, results: list[Any], rank: int) -> _Request | None:
    try:
        return next(steps) if received is None else steps.send(received)
    except StopIteration as stop:
        results[rank] = stop.value
        return None


def _communicate(requests: Mapping[int, _Request], mesh: Mesh) -> dict[int, Tensor]:
    """What every rank receives from a collective that all have reached."""
    received = {}
    for rank, own in requests.items():
        place = mesh.coordinate_of(rank)
        axis, index = own.does.axis, place[own.does.axis]
        group = [requests[mesh.rank_at({**place, axis: other})].sent for other in range(mesh.sizes[axis])]
        assert {tensor.shape for tensor in group} == {own.sent.shape}, f"{own.does}: pieces of different shapes"
        assert own.sent.is_contiguous(), f"{own.does}: a piece with gaps"
        match own.does.kind:
            case "all_gather":
                received[rank] = torch.cat(group)
            case "all_reduce":
                received[rank] = _reduce(group, own.reduce_op)
            case "reduce_scatter":
                received[rank] = _reduce(group, own.reduce_op).chunk(len(group))[index].clone()
            case "all_to_all":
                received[rank] = torch.cat([tensor.chunk(len(group))[index] for tensor in group])
    return received


def _reduce(group: Sequence[Tensor], op: str) -> Tensor:
    total = group[0]
    for tensor in group[1:]:
        total = torch.maximum(total, tensor) if op == "max" else total + tensor
    return total.clone()
