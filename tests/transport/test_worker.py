"""Jobs run in order beside the caller, their errors reach who waits, and what they held is let go."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from fxpar.transport.worker import Worker


def test_jobs_run_in_order() -> None:
    worker, done = Worker("test"), list[int]()
    futures = [worker.submit(lambda number=number: done.append(number)) for number in range(20)]
    for future in futures:
        future.result()
    assert done == list(range(20))


def test_an_error_is_the_futures_and_later_jobs_still_run() -> None:
    def fail() -> None:
        raise ValueError("no")

    worker = Worker("test")
    failed, after = worker.submit(fail), worker.submit(lambda: None)
    with pytest.raises(ValueError, match="no"):
        failed.result()
    after.result()


def test_what_a_job_held_is_let_go_before_anyone_learns_that_it_is_done() -> None:
    worker = Worker("test")
    for _ in range(200):
        held = torch.empty(1)
        ref = weakref.ref(held)
        future = worker.submit(lambda value=held: None)
        del held
        future.result()
        assert ref() is None


def test_jobs_of_several_threads_run_in_one() -> None:
    worker, ran_in = Worker("test"), set[int]()
    together = threading.Barrier(8)

    def submit() -> None:
        together.wait()
        worker.submit(lambda: ran_in.add(threading.get_ident())).result()

    submitters = [threading.Thread(target=submit) for _ in range(8)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    assert len(ran_in) == 1


def test_a_worker_that_nobody_has_any_more_ends_its_thread() -> None:
    worker = Worker("a worker of no one")
    worker.submit(lambda: None).result()
    (running,) = [each for each in threading.enumerate() if each.name == "a worker of no one"]
    del worker
    running.join(10)
    assert not running.is_alive()
