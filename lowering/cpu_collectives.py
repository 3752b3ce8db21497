"""Collectives of CPU tensors in place of gloo's: through shared memory if all ranks of a group are on one host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpar._torch.distributed import Work, c10d_functional, process_group_named, register_work
from fxpar.core.sum import add_up
from fxpar.errors import SharedMemoryError
from fxpar.graph.extract import copied
from fxpar.ir.node_meta import tensor
from fxpar.lowering.host_collectives import HostCollectives
from fxpar.transport.shared_segment import share_memory
from fxpar.world.hosts import discover_hosts


def replace_cpu_collectives(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph`, or a copy in which the functional collectives of CPU tensors are those of this file."""
    nodes = [node.name for node in graph.graph.nodes if node.target in _REPLACED and tensor(node).device.type == "cpu"]
    if not nodes:
        return graph
    replaced = copied(graph.graph.nodes)
    names = set(nodes)
    for node in replaced.nodes:
        if node.name in names:
            node.target = _REPLACED[node.target]
    return fx.GraphModule(graph, replaced)


def all_reduce(value: Tensor, reduction: str, group_name: str) -> Tensor:
    """The functional all_reduce, by "sum" or "max"."""
    on_host = _on_one_host(group_name)
    if on_host is not None:
        return on_host.all_reduce(value, reduction)
    started: Tensor = c10d_functional.all_reduce(value, reduction, group_name)
    return started


def sum_in_place(value: Tensor, group_name: str) -> Tensor:
    """The functional all_reduce_ of a sum, for a contiguous tensor on any device."""
    on_host = _on_one_host(group_name) if value.device.type == "cpu" else None
    if on_host is not None:
        return on_host.all_reduce_in_place(value, "sum")
    started: Tensor = c10d_functional.all_reduce_(value, "sum", group_name)
    return started


def all_gather(value: Tensor, parts: int, group_name: str) -> Tensor:
    """The functional all_gather_into_tensor."""
    on_host = _on_one_host(group_name)
    if on_host is not None:
        return on_host.all_gather(value)
    started: Tensor = c10d_functional.all_gather_into_tensor(value, parts, group_name)
    return started


def all_to_all(value: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """The functional all_to_all_single, if all pieces are of equal size."""
    assert len({*received, *sent}) == 1, f"pieces of {received} and {sent} rows"
    on_host = _on_one_host(group_name)
    if on_host is not None:
        return on_host.all_to_all(value)
    started: Tensor = c10d_functional.all_to_all_single(value, received, sent, group_name)
    return started


def reduce_scatter(value: Tensor, reduction: str, parts: int, group_name: str) -> Tensor:
    """The functional reduce_scatter_tensor, by "sum" or "max"."""
    on_host = _on_one_host(group_name)
    if on_host is not None:
        return on_host.reduce_scatter(value, reduction)
    return exchange_and_reduce(value, reduction, parts, group_name)


_REPLACED: Mapping[object, Callable[..., Any]] = {
    c10d_functional.all_reduce.default: all_reduce,
    c10d_functional.all_gather_into_tensor.default: all_gather,
    c10d_functional.all_to_all_single.default: all_to_all,
    c10d_functional.reduce_scatter_tensor.default: reduce_scatter,
}


def _on_one_host(group_name: str) -> HostCollectives | None:
    """The collectives in shared memory; None if there are several hosts, or others than gloo's are asked for."""
    group = process_group_named(group_name)
    if group not in _known:
        by_gloo = group.size() > 1 and "cpu:gloo" in dist.get_backend_config(group).split(",")
        on_one_host = by_gloo and len(set(discover_hosts(group))) == 1
        _known[group] = HostCollectives(group) if on_one_host and _has_shared_memory(group) else None
    return _known[group]


def _has_shared_memory(group: dist.ProcessGroup) -> bool:
    """Whether all ranks have it: each learns of another that has not."""
    try:
        share_memory(group)
    except SharedMemoryError:
        return False
    return True


_known: WeakKeyDictionary[dist.ProcessGroup, HostCollectives | None] = WeakKeyDictionary()


def exchange_and_reduce(value: Tensor, reduction: str, parts: int, group_name: str) -> Tensor:
    """A reduce-scatter over gloo, whose own sends as many bytes as its all-reduce; this one sends half of them.

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
