"""A thread that works through what it is given in order, beside the thread that computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread


class Worker:
    """Starts with its first job, and ends with the process: it never keeps a process alive that has failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after all that was submitted before; its error is the future's."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while True:
            job, future = self._jobs.get()
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:
                failure = error
            del job  # who waits for it may use again what it held
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
            del future, failure
