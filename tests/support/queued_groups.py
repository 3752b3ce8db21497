"""Process groups on CPUs that forgive as little as NCCL's, so that what would hang on GPUs hangs here.

As NCCL's: a group's first collective keeps its caller until all members have come to it. After that a group is a queue
on each rank, which runs one collective after another, and each of these is over when all members have come to it. A
rank has a limited number of hardware queues, which its groups share: what stands behind a collective that waits for
others waits, too.

When a rank ends, what others wait for does not come, and nothing raises: a collective is over when its group is
aborted, with anything in its buffers.

Unlike NCCL's, `Work.wait` keeps the caller, where NCCL makes its stream wait. That is the same to other ranks: whatever
a rank issues later comes after what it has waited for, there as here. In `running_ahead` it returns at once, as NCCL's:
values are meaningless there, and `wait_for_device` keeps the caller, as reading a value does on GPUs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch.distributed import is_connection_error
from fxpar.runtime.stage_runner import StageRunner
from fxpar.schedule import Kind
from tests.support.no_host_wait import forbid_host_waits

BACKEND = "queued"

HARDWARE_QUEUES = "FXPAR_TEST_HARDWARE_QUEUES"
"""The environment variable that says how many a rank has; without it, as many as CUDA has at most."""

PATIENCE_S = "FXPAR_TEST_PATIENCE_S"
"""The environment variable that says after how long a collective is said to hang."""

_MOST = 32

_LOOK_EVERY = timedelta(milliseconds=20)
"""How long a collective that waits for others goes on after an abort, at most."""


class HangError(Exception):
    """On NCCL, nobody would have told."""


def _patience() -> timedelta:
    return timedelta(seconds=float(os.environ.get(PATIENCE_S, 60)))


class _Queues:
    """The hardware queues of this rank, given to groups in turn."""

    def __init__(self, count: int) -> None:
        self._queues = [ThreadPoolExecutor(1, f"hardware queue {number}") for number in range(count)]
        self._next = itertools.cycle(self._queues)

    def next(self) -> ThreadPoolExecutor:
        return next(self._next)


_queues: list[_Queues] = []


def _queues_of_this_rank() -> _Queues:
    if not _queues:
        _queues.append(_Queues(int(os.environ.get(HARDWARE_QUEUES, _MOST))))
    return _queues[0]


_under_way: set[Future[None]] = set()
"""What this rank's queues have not done yet."""

_runs_ahead = Event()


@contextmanager
def running_ahead() -> Iterator[None]:
    """Inside, `Work.wait` returns at once."""
    _runs_ahead.set()
    try:
        yield
    finally:
        _runs_ahead.clear()


def wait_for_device() -> None:
    """Wait until the queues of this rank have done all.

    Raises:
        HangError: they never would.
    """
    if wait_for_all(tuple(_under_way), _patience().total_seconds()).not_done:
        raise HangError("the device does not end")


class _QueuedWork(dist._Work):
    """A collective in its queue."""

    def __init__(self, what: str, done: Future[None]) -> None:
        super().__init__()
        self._what, self._done = what, done

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            if not _runs_ahead.is_set():
                self._done.result(_patience().total_seconds())
        except FutureTimeoutError:
            raise HangError(f"{self._what} does not end") from None
        return True

    def is_completed(self) -> bool:
        return self._done.done()


class QueuedGroup(dist.ProcessGroup):
    """One group; `gloo` does the work when a collective's turn has come."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._queue = _queues_of_this_rank().next()
        self._is_connected, self._is_aborted = False, Event()
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def abort(self) -> None:
        self._is_aborted.set()

    def _wait_for_pending_works(self) -> None:
        wait_for_all(tuple(_under_way))

    def _put(self, what: str, begin: Callable[[], Any]) -> _QueuedWork:
        if self._is_aborted.is_set():
            raise dist.DistBackendError(f"the communicator of group {self._name} was aborted")
        if not self._is_connected:
            self._connect(what)
        done = self._queue.submit(self._run, begin)
        _under_way.add(done)
        done.add_done_callback(_under_way.discard)
        return _QueuedWork(f"{what} of group {self._name}", done)

    def _run(self, begin: Callable[[], Any]) -> None:
        """Returns when the collective is over, or is aborted."""
        try:
            work = None if self._is_aborted.is_set() else begin()
            while not (work is None or self._is_aborted.is_set() or _is_over(work)):
                pass
        except RuntimeError as error:
            if not is_connection_error(error):
                raise
            self._is_aborted.wait()  # a rank has ended, of which NCCL would tell nobody

    def _connect(self, what: str) -> None:
        try:
            self._gloo.barrier(dist.BarrierOptions()).wait(_patience())
        except RuntimeError:
            raise HangError(f"{what}, the first collective of group {self._name}, finds nobody there") from None
        self._is_connected = True

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> _QueuedWork:
        return self._put("broadcast", lambda: self._gloo.broadcast(tensors, opts))

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> _QueuedWork:
        return self._put("all_reduce", lambda: self._gloo.allreduce(tensors, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _QueuedWork:
        return self._put("all_gather", lambda: self._gloo.allgather(outputs, inputs))

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> _QueuedWork:
        return self._put("all_gather_into_tensor", lambda: self._gloo._allgather_base(output, given))

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _QueuedWork:
        """As functional collectives call it, of one tensor."""
        (output,), (given,) = outputs, inputs
        return self._allgather_base(output, given)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: dist.ReduceScatterOptions) -> _QueuedWork:
        return self._put("reduce_scatter_tensor", lambda: self._gloo._reduce_scatter_base(output, given, opts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: dist.ReduceScatterOptions
    ) -> _QueuedWork:
        """As functional collectives call it, of one tensor."""
        (output,), (given,) = outputs, inputs
        return self._reduce_scatter_base(output, given, opts)

    def alltoall_base(
        self, output: Tensor, given: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int], opts: Any = None
    ) -> _QueuedWork:
        return self._put("all_to_all", lambda: self._gloo.alltoall_base(output, given, sizes_out, sizes_in))

    # As torch calls them from release 2.15 on.
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: dist.BarrierOptions | None = None) -> _QueuedWork:
        return self._put("barrier", lambda: self._gloo.barrier(dist.BarrierOptions()))


def _is_over(work: dist.Work) -> bool:
    """Whether it is over within a short time."""
    try:
        work.wait(_LOOK_EVERY)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises, unless it was over just then
    return True


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> QueuedGroup:
    return QueuedGroup(store, rank, size, timeout)


def use_queued_groups() -> None:
    """Form the world anew of such groups; on each rank that `run_ranks` started."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    dist.barrier()  # who leaves a world early breaks connections that others are still making
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, store=dist.PrefixStore(BACKEND, store), rank=rank, world_size=size)
    assert torch.distributed.get_backend() == BACKEND


def wait_at_first_launches() -> None:
    """From here on, in this process, a stage's first computation of a kind waits until the device has done all else.

    So may a GPU's first launch of a kernel: its code has to be loaded.
    """
    run, launched = StageRunner.run, set[tuple[StageRunner, str]]()

    def loaded(self: StageRunner, kind: Kind, *args: Any) -> None:
        if (self, kind) not in launched:
            launched.add((self, kind))
            wait_for_device()
        run(self, kind, *args)

    StageRunner.run = loaded  # type: ignore[method-assign]


def on_queued_groups(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` in such a world, in whose steps no rank's host waits for its device; for `run_ranks`."""
    use_queued_groups()
    forbid_host_waits()
    wait_at_first_launches()
    return work(*args)
