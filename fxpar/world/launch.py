"""Start ranks on this machine, without a launcher: run a function in several processes, and return its results."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxpar._torch.distributed import HashStore
from fxpar.garbage_collection import freeze_objects
from fxpar.world.gloo_threads import rest_before_exit
from fxpar.world.rank_servers import RankServers, serve

T = TypeVar("T")

# Modules that ranks have already imported; a caller may add others before the first call of `run_ranks`.
PRELOADED = ["fxpar.backend", "fxpar.distribute_model", "fxpar.model.clip"]

# How long ranks may take to exit after they have returned their results, or were killed.
_ENDING_S = 10.0


class RankFailedError(RuntimeError):
    """A rank raised, ended early, or took too long; the message has its traceback."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"rank {rank} failed:\n{problem}")
        self.rank = rank


def join_world() -> torch.device:
    """Form the world of the ranks that torchrun started, or of this process alone; returns the device of this rank.

    A rank that dies of a fault, such as a corrupt heap, prints the stacks of all its threads.
    """
    faulthandler.enable(sys.__stderr__ or sys.stderr)  # a notebook or a test may have replaced sys.stderr
    rest_before_exit()
    if not dist.is_torchelastic_launched():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def run_ranks(
    num_ranks: int,
    work: Callable[..., T],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    enter: Callable[[int], None] | None = None,
    doomed: Collection[int] = (),
    timeout_s: float = 300.0,
) -> list[T]:
    """Run `work(*args)` in `num_ranks` processes that form a gloo process group; returns what each rank returned.

    `work` is a function of an importable module; it, its arguments and its results are pickled. Each process has one
    thread and the caller's folder, search path and standard streams. It sets `environment`, with FXPAR_QUIET=1 by
    default, since it is for the caller to show what goes on, and calls `enter(rank)`, which may for instance enter a
    network namespace, before it joins the group. The processes are forked from servers that have imported torch
    already, so they start fast; those of neighbours have different hash seeds. None outlives the call. Ranks in
    `doomed` are expected to end without a result, as if they had crashed; the returned list leaves them out.

    Raises:
        RankFailedError: a rank raised, ended early, or was not done after `timeout_s`. A rank that times out, or dies
            of a fault such as a corrupt heap, prints the stacks of all its threads.
    """
    job = pickle.dumps((work, args, environment or {}, enter))
    with ExitStack() as running:
        store = f"file://{running.enter_context(TemporaryDirectory())}/store"
        lines, processes = [], []
        for rank in range(num_ranks):
            line = running.enter_context(_rank_servers().fork(rank, PRELOADED))
            line.send((os.getcwd(), sys.path, timeout_s, (store, rank, num_ranks)))
            line.send_bytes(job)
            lines.append(line)
        for rank, line in enumerate(lines):
            processes.append(_process_of(rank, line))
            running.callback(_kill, processes[-1])
        results = _collect(lines, processes, doomed)
        for line in lines:
            line.close()  # each rank waits for this, so that none exits while others still communicate with it
        _await_end(processes)
    return results


def use_rank_servers(servers: RankServers) -> None:
    """Fork ranks from `servers`, which another process owns; to be called before the first `run_ranks`."""
    _servers.append(servers)


def _rank_servers() -> RankServers:
    if not _servers:
        _servers.append(RankServers.own())
    return _servers[0]


_servers: list[RankServers] = []
"""The servers that this process forks ranks from; empty before the first."""


def _process_of(rank: int, line: Connection) -> int:
    try:
        pid: int = line.recv()
    except (EOFError, OSError) as error:
        raise RankFailedError(rank, "it did not start; the process that it is forked from says why") from error
    return pid


def run_rank(line: Connection) -> None:
    """The main function of a forked process: run as the rank that `run_ranks` describes over `line`."""
    freeze_objects()  # those of the server live as long as this process: collections would only copy shared pages
    line.send(os.getpid())
    folder, sys.path[:], timeout_s, group = line.recv()
    job = line.recv_bytes()
    is_done = Event()
    watch = Thread(target=_end_with_caller, args=(line, is_done), daemon=True)
    watch.start()
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    torch.set_num_threads(1)
    store, rank, num_ranks = group
    try:
        os.chdir(folder)
        work, args, environment, enter = pickle.loads(job)
        os.environ |= {"FXPAR_QUIET": "1", **environment}
        if enter is not None:
            enter(rank)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        outcome = pickle.dumps((work(*args), None))
    except Exception:
        outcome = pickle.dumps((None, traceback.format_exc()))
    is_done.set()
    line.send_bytes(outcome)
    watch.join()


def serve_ranks() -> None:
    """The main function of the servers of `RankServers`: fork processes that are ranks."""
    serve(run_rank)


def _end_with_caller(line: Connection, is_done: Event) -> None:
    """Wait until the caller closes `line`, or was killed; if this rank is not done then, it exits at once."""
    with suppress(EOFError, OSError):
        line.recv_bytes()
    if not is_done.is_set():
        os._exit(1)


def _collect(lines: Sequence[Connection], processes: Sequence[int], doomed: Collection[int]) -> list[Any]:
    """The results of all ranks that are not doomed; the first failure raises, without waiting for other ranks."""
    results: dict[int, Any] = {}
    expected = [rank for rank in range(len(lines)) if rank not in doomed]
    while len(results) < len(expected):
        pending = {lines[rank]: rank for rank in expected if rank not in results}
        for line in wait(list(pending)):
            assert isinstance(line, Connection)
            rank = pending[line]
            try:
                results[rank], problem = pickle.loads(line.recv_bytes())
            except EOFError:
                problem = f"it ended without a result {_rank_servers().end_of(processes[rank])}".rstrip()
            if problem is not None:
                raise RankFailedError(rank, problem)
    return [results[rank] for rank in expected]


def _await_end(processes: Sequence[int]) -> None:
    deadline = time.monotonic() + _ENDING_S
    while any(_runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.001)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _kill(process: int) -> None:
    """Kill a process, and wait until it has ended; one that a debugger holds may outlive the wait."""
    deadline = time.monotonic() + _ENDING_S
    while _runs(process) and time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
