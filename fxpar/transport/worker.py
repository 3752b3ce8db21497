"""A thread that runs jobs in order, concurrently with the thread that computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeAlias
from weakref import finalize

_Jobs: TypeAlias = "SimpleQueue[tuple[Callable[[], None], Future[None]] | None]"


class Worker:
    """Its daemon thread starts with the first job, and ends when the worker is collected or the process ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs = SimpleQueue()
        self._has_started = False
        self._starting = Lock()  # two threads would run jobs out of order

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after all that were submitted before; the future has its error."""
        with self._starting:
            if not self._has_started:
                Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
                finalize(self, self._jobs.put, None).atexit = False
                self._has_started = True
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future


def _work(jobs: _Jobs) -> None:
    while (given := jobs.get()) is not None:
        job, future = given
        failure: BaseException | None = None
        try:
            job()
        except BaseException as error:
            failure = error
        del given, job  # before the future is done: its waiter may reuse the buffers that the job held
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
        del future, failure
