"""A thread that works through what it is given in order, beside the thread that computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeAlias
from weakref import finalize

_Jobs: TypeAlias = "SimpleQueue[tuple[Callable[[], None], Future[None]] | None]"


class Worker:
    """Its thread starts with its first job, and ends with it or with the process, which it never keeps alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs = SimpleQueue()
        self._has_started = False
        self._starting = Lock()  # two threads would work out of order

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after all that was submitted before; its error is the future's."""
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
        del given, job  # who waits for it may use again what it held
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
        del future, failure
