"""Collectives of CPU ranks on one host: each rank publishes its value in shared memory, and reads those of the others.

A collective begins with publishing; the others' values are read when the result is waited for. So no thread is needed,
and the delay of the others overlaps with what a rank computes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from fxpar._torch.distributed import Work, register_work
from fxpar.core.sum import reduce_terms
from fxpar.errors import LostInCollectiveError, PeerLostError
from fxpar.transport.channel import Arrival, ChannelRequest, open_channels

_TIMEOUT_S = default_pg_timeout.total_seconds()

Read: TypeAlias = Callable[[Mapping[int, Tensor]], None]
"""Finishes a collective, given what the other ranks have published."""


class HostCollectives:
    """The collectives of `group`, whose ranks are on one host; all call the same ones in the same order.

    Results are as those of the functional collectives, and ready after `wait_tensor`. Sums are added up in the order of
    ranks, so that all ranks have the same bits; 16-bit floats are added up in float32. Making it is a collective.

    Raises:
        SharedMemoryError: the machine has not enough memory that processes can share.
        PeerLostError: another rank has ended.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        names = [f"the collectives of rank {rank}" for rank in dist.get_process_group_ranks(group)]
        readers = [
            tuple(reader for reader in range(self._num_ranks) if reader != rank) for rank in range(self._num_ranks)
        ]
        channels = open_channels(list(map(ChannelRequest, names, range(self._num_ranks), readers)), group)
        self._writer = channels.writers[names[self._rank]]
        self._readers = {rank: channels.readers[names[rank]] for rank in readers[self._rank]}

    def all_reduce(self, value: Tensor, reduction: str) -> Tensor:
        """The sum or maximum of the values of all ranks."""
        return self.all_reduce_in_place(value.clone(memory_format=torch.contiguous_format), reduction)

    def all_reduce_in_place(self, value: Tensor, reduction: str) -> Tensor:
        """`value`, contiguous, which becomes the sum or maximum of those of all ranks."""
        return self._exchange(value, value, lambda others: self._reduce(others, reduction, value))

    def reduce_scatter(self, value: Tensor, reduction: str) -> Tensor:
        """This rank's piece, along the first dim, of the sum or maximum of the values of all ranks."""
        result = self._pieces(value)[self._rank].clone(memory_format=torch.contiguous_format)

        def read(others: Mapping[int, Tensor]) -> None:
            pieces = {rank: self._pieces(other)[self._rank] for rank, other in others.items()}
            self._reduce(pieces, reduction, result)

        return self._exchange(value, result, read)

    def all_gather(self, value: Tensor) -> Tensor:
        """The values of all ranks, one after the other along the first dim."""
        result = value.new_empty([self._num_ranks * value.shape[0], *value.shape[1:]])
        pieces = self._pieces(result)
        pieces[self._rank].copy_(value)

        def read(others: Mapping[int, Tensor]) -> None:
            for rank, other in others.items():
                pieces[rank].copy_(other)

        return self._exchange(value, result, read)

    def all_to_all(self, value: Tensor) -> Tensor:
        """The pieces, along the first dim, that all ranks have for this one."""
        result = torch.empty_like(value, memory_format=torch.contiguous_format)
        pieces = self._pieces(result)
        pieces[self._rank].copy_(self._pieces(value)[self._rank])

        def read(others: Mapping[int, Tensor]) -> None:
            for rank, other in others.items():
                pieces[rank].copy_(self._pieces(other)[self._rank])

        return self._exchange(value, result, read)

    def _pieces(self, value: Tensor) -> Tensor:
        """`value` in as many pieces along its first dim as there are ranks: (ranks, size, ...)."""
        size, *rest = value.shape
        return value.view(self._num_ranks, size // self._num_ranks, *rest)

    def _reduce(self, others: Mapping[int, Tensor], reduction: str, result: Tensor) -> None:
        """Reduce the terms of the others and of this rank, which `result` holds, into `result`."""
        reduce_terms([others.get(rank, result) for rank in range(self._num_ranks)], reduction, result)

    def _exchange(self, value: Tensor, result: Tensor, read: Read) -> Tensor:
        with _in_collective():
            message = self._writer.begin(value.nbytes)
        _as_tensor(message.buffer, value.dtype, value.shape).copy_(value)
        message.publish(value.nbytes)
        arrivals = {rank: reader.receive(value.nbytes) for rank, reader in self._readers.items()}
        register_work(result, _Reading(arrivals, value.dtype, value.shape, read))
        return result


class _Reading(Work):
    """What is left of a collective when this rank has published its value: to read those of the others."""

    def __init__(self, arrivals: Mapping[int, Arrival], dtype: torch.dtype, shape: Sequence[int], read: Read) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._dtype, self._shape = dtype, shape
        self._read = read

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish. `wait_tensor` calls it once, without a timeout.

        Raises:
            LostInCollectiveError: another rank has ended.
        """
        with _in_collective():
            memory = {rank: arrival.wait(arrival.num_bytes, _TIMEOUT_S) for rank, arrival in self._arrivals.items()}
        self._read({rank: _as_tensor(each, self._dtype, self._shape) for rank, each in memory.items()})
        for arrival in self._arrivals.values():
            arrival.release()
        return True


@contextmanager
def _in_collective() -> Iterator[None]:
    """A context in which a PeerLostError, which names a message, becomes one whose value the caller names."""
    try:
        yield
    except PeerLostError as lost:
        raise LostInCollectiveError("a value in a collective", lost.peer, lost.reason) from lost


def _as_tensor(memory: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The bytes `memory` as a contiguous tensor."""
    return memory.view(dtype).view(shape)
