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
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.core.sum import reduce_terms
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
    return lazy_graph_module(graph, replaced)


def all_reduce(value: Tensor, reduction: str, group_name: str) -> Tensor:
    """The functional all_reduce, by "sum" or "max"."""
    return collectives_of(process_group_named(group_name), "cpu").all_reduce(value, reduction)


def sum_in_place(value: Tensor, group_name: str) -> Tensor:
    """The functional all_reduce_ of a sum, for a contiguous tensor on any device."""
    return collectives_of(process_group_named(group_name), value.device.type).all_reduce_in_place(value, "sum")


def all_gather(value: Tensor, parts: int, group_name: str) -> Tensor:
    """The functional all_gather_into_tensor."""
    return collectives_of(process_group_named(group_name), "cpu").all_gather(value)


def all_to_all(value: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """The functional all_to_all_single, if all pieces are of equal size."""
    assert len({*received, *sent}) == 1, f"pieces of {received} and {sent} rows"
    return collectives_of(process_group_named(group_name), "cpu").all_to_all(value)


def reduce_scatter(value: Tensor, reduction: str, parts: int, group_name: str) -> Tensor:
    """The functional reduce_scatter_tensor, by "sum" or "max"."""
    return collectives_of(process_group_named(group_name), "cpu").reduce_scatter(value, reduction)


_REPLACED: Mapping[object, Callable[..., Any]] = {
    c10d_functional.all_reduce.default: all_reduce,
    c10d_functional.all_gather_into_tensor.default: all_gather,
    c10d_functional.all_to_all_single.default: all_to_all,
    c10d_functional.reduce_scatter_tensor.default: reduce_scatter,
}


class C10dCollectives:
    """The functional collectives of a group, as `HostCollectives` has them."""

    def __init__(self, group_name: str) -> None:
        self._name, self._num_ranks = group_name, process_group_named(group_name).size()

    def all_reduce(self, value: Tensor, reduction: str) -> Tensor:
        """See `HostCollectives`."""
        started: Tensor = c10d_functional.all_reduce(value, reduction, self._name)
        return started

    def all_reduce_in_place(self, value: Tensor, reduction: str) -> Tensor:
        """See `HostCollectives`."""
        started: Tensor = c10d_functional.all_reduce_(value, reduction, self._name)
        return started

    def reduce_scatter(self, value: Tensor, reduction: str) -> Tensor:
        """See `HostCollectives`; of CPU tensors, by an all-to-all."""
        if value.device.type == "cpu":
            return exchange_and_reduce(value, reduction, self._num_ranks, self._name)
        started: Tensor = c10d_functional.reduce_scatter_tensor(value, reduction, self._num_ranks, self._name)
        return started

    def all_gather(self, value: Tensor) -> Tensor:
        """See `HostCollectives`."""
        started: Tensor = c10d_functional.all_gather_into_tensor(value, self._num_ranks, self._name)
        return started

    def all_to_all(self, value: Tensor) -> Tensor:
        """See `HostCollectives`."""
        sizes = [value.shape[0] // self._num_ranks] * self._num_ranks
        started: Tensor = c10d_functional.all_to_all_single(value, sizes, sizes, self._name)
        return started


def collectives_of(group: dist.ProcessGroup, device_type: str) -> HostCollectives | C10dCollectives:
    """The collectives that graphs run for tensors on such devices. A collective in the first call with a group.

    Those of CPU tensors go through shared memory if all ranks are on one host, and the group is gloo's.
    """
    if device_type != "cpu":
        return C10dCollectives(group.group_name)
    if group not in _of_cpus:
        by_gloo = group.size() > 1 and "cpu:gloo" in dist.get_backend_config(group).split(",")
        on_one_host = by_gloo and len(set(discover_hosts(group))) == 1 and _has_shared_memory(group)
        _of_cpus[group] = HostCollectives(group) if on_one_host else C10dCollectives(group.group_name)
    return _of_cpus[group]


def _has_shared_memory(group: dist.ProcessGroup) -> bool:
    """Whether all ranks have it: each learns of another that has not."""
    try:
        share_memory(group)
    except SharedMemoryError:
        return False
    return True


_of_cpus: WeakKeyDictionary[dist.ProcessGroup, HostCollectives | C10dCollectives] = WeakKeyDictionary()


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
        reduce_terms(self._pieces.unbind(), self._reduction, self._result)
        return True
