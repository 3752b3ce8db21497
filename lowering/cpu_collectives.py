"""A reduce-scatter for CPUs, which sends half the bytes of gloo's own."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpar._torch.distributed import Work, c10d_functional, process_group_named, register_work
from fxpar.core.sum import add_up
from fxpar.graph.extract import copied
from fxpar.ir.node_meta import tensor


def replace_cpu_collectives(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph`, or a copy in which the reduce-scatters of CPU tensors are `exchange_and_reduce`."""
    scatters = graph.graph.find_nodes(op="call_function", target=c10d_functional.reduce_scatter_tensor.default)
    if not any(tensor(node).device.type == "cpu" for node in scatters):
        return graph
    replaced = copied(graph.graph.nodes)
    for node in replaced.find_nodes(op="call_function", target=c10d_functional.reduce_scatter_tensor.default):
        if tensor(node).device.type == "cpu":
            node.target = exchange_and_reduce
    return fx.GraphModule(graph, replaced)


def exchange_and_reduce(value: Tensor, reduction: str, parts: int, group_name: str) -> Tensor:
    """The functional reduce_scatter_tensor: gloo's sends as many bytes as its all_reduce, this one half of them.

    The ranks exchange their pieces in an all-to-all. Each rank reduces the pieces that it received, in the order of
    ranks, when it waits for the result.

    Args:
        value: dense; its first dim is scattered.
        reduction: "sum" or "max".
        parts: the number of ranks in the group.
        group_name: the group.
    """
    received = torch.empty_like(value)
    exchange = dist.all_to_all_single(received, value, group=process_group_named(group_name), async_op=True)
    assert exchange is not None, "this rank is not in the group"
    pieces = received.unflatten(0, (parts, -1))
    result = torch.empty_like(pieces[0])
    register_work(result, _Reduction(exchange, pieces, reduction, result))
    return result


class _Reduction(Work):
    """An all-to-all of pieces in flight; `wait` reduces them into `result`."""

    def __init__(self, exchange: dist.Work, pieces: Tensor, reduction: str, result: Tensor) -> None:
        super().__init__()
        self._exchange = exchange
        self._pieces = pieces
        self._reduction = reduction
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish. `wait_tensor` calls it once, without a timeout."""
        self._exchange.wait()
        if self._reduction == "sum":
            add_up(self._pieces.unbind(), self._result)
        else:
            torch.amax(self._pieces, 0, out=self._result)
        return True
