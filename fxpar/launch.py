"""Start ranks on this machine, without a launcher: a function runs in several processes and its results come back."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxpar._torch import HashStore

T = TypeVar("T")

# Modules that ranks find imported; what heavier work imports can be added before the first call of `run_ranks`.
PRELOADED = ["fxpar.backend"]


class RankFailedError(RuntimeError):
    """A rank raised, ended early, or took too long; the message has its traceback."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"rank {rank} failed:\n{problem}")
        self.rank = rank


def join_world() -> torch.device:
    """Form the world of the ranks that torchrun started, or of this process alone; gives the device of this rank."""
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
    """Run `work(*args)` in `num_ranks` processes that form a gloo process group; gives what each rank returned.

    `work` is a function of an importable module; it, its arguments and its results travel pickled. Each process has one
    thread, sets `environment`, and calls `enter(rank)`, which may bring it to another place, before it joins the group.
    The processes are forked from a server that has imported torch once and never ran it, so they start in a moment,
    whatever the caller's process did before. None outlives the call. Ranks that are `doomed` are to end without a
    result, as if they had crashed, and none is given for them.

    Raises:
        RankFailedError: a rank raised, ended early, or was not done after `timeout_s`, when it prints all its stacks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    job = pickle.dumps((work, args))
    with ExitStack() as running:
        store = f"file://{running.enter_context(TemporaryDirectory())}/store"
        lines, processes = [], []
        for rank in range(num_ranks):
            line, theirs = context.Pipe()
            group = (store, rank, num_ranks)
            process = context.Process(target=_run_rank, args=(job, theirs, group, environment or {}, enter, timeout_s))
            process.start()
            running.callback(_end, process)
            theirs.close()
            lines.append(running.enter_context(line))
            processes.append(process)
        results = _collect(lines, doomed)
        for line in lines:
            line.close()  # each rank waits for this, so that none leaves while others still talk to it
        for process in processes:
            process.join(timeout=10)
    return results


def _run_rank(
    job: bytes,
    line: Connection,
    group: tuple[str, int, int],
    environment: Mapping[str, str],
    enter: Callable[[int], None] | None,
    timeout_s: float,
) -> None:
    gc.freeze()  # what the server made lives as long as this process: collections would only copy its shared pages
    is_done = Event()
    watch = Thread(target=_end_with_caller, args=(line, is_done), daemon=True)
    watch.start()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    os.environ.update(environment)
    torch.set_num_threads(1)
    store, rank, num_ranks = group
    try:
        if enter is not None:
            enter(rank)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        work, args = pickle.loads(job)
        outcome = pickle.dumps((work(*args), None))
    except Exception:
        outcome = pickle.dumps((None, traceback.format_exc()))
    is_done.set()
    line.send_bytes(outcome)
    watch.join()


def _end_with_caller(line: Connection, is_done: Event) -> None:
    """Wait until the caller closes `line`, if only because it was killed; a rank that is not done then ends at once."""
    with suppress(EOFError, OSError):
        line.recv_bytes()
    if not is_done.is_set():
        os._exit(1)


def _collect(lines: Sequence[Connection], doomed: Collection[int]) -> list[Any]:
    """What each rank returned that is not doomed; the first failure ends the wait."""
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
                problem = "it ended without a result"
            if problem is not None:
                raise RankFailedError(rank, problem)
    return [results[rank] for rank in expected]


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()
