"""Ranks started by `run_ranks` talk, return, fail with their traceback, and never outlive the call."""

import os
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist

from fxpar.world.launch import RankFailedError, run_ranks
from fxpar.world.rank_servers import RankServers
from tests.support.killed_process import kill_and_await_end_of_all, next_line, running


def sum_of_ranks(offset: int) -> tuple[int, int, int]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return int(total), torch.get_num_threads(), os.getpid()


def order_of_strings() -> list[str]:
    return list({str(number) for number in range(20)})


def fail_on_rank_1_while_rank_0_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    dist.barrier()


def end_without_a_word() -> None:
    os._exit(3)


def wait_beside(is_there: Event) -> None:
    is_there.set()
    Event().wait()


def die_of_a_fault(errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    is_there = Event()
    Thread(target=wait_beside, args=[is_there], daemon=True).start()
    is_there.wait()
    os.abort()  # as the C library does where it finds the heap corrupt


def read_variable(name: str) -> str:
    return os.environ[name]


def note_place(rank: int) -> None:
    os.environ["FXPAR_PLACE"] = f"{os.environ['FXPAR_TOWN']}, house {rank}, joined: {dist.is_initialized()}"


def fail_to_enter(rank: int) -> None:
    raise PermissionError(f"no entry for {rank}")


def hold_ranks() -> None:
    run_ranks(2, wait_forever)


def wait_forever() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        print("all are there", flush=True)
    while True:
        dist.barrier()


def differentiate() -> float:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def test_ranks_form_one_group_have_one_thread_each_and_are_gone_afterwards() -> None:
    results = run_ranks(3, sum_of_ranks, 10)
    assert [total for total, _, _ in results] == [33, 33, 33]
    assert {threads for _, threads, _ in results} == {1}
    for _, _, pid in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_each_rank_orders_sets_in_its_own_way_as_those_of_a_launcher_do() -> None:
    orders = run_ranks(4, order_of_strings)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_a_failure_ends_the_ranks_that_wait_and_shows_the_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 failed:\n(.|\n)*in fail_on_rank_1(.|\n)*no such thing"):
        run_ranks(2, fail_on_rank_1_while_rank_0_waits)


def test_a_rank_that_ends_early_is_named() -> None:
    with pytest.raises(RankFailedError, match="rank 0 failed:\nit ended without a result with status 3"):
        run_ranks(1, end_without_a_word)


def test_a_rank_that_dies_of_a_fault_prints_the_stacks_of_all_its_threads(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with pytest.raises(RankFailedError, match="it ended without a result by SIGABRT"):
        run_ranks(1, die_of_a_fault, errors)
    for printed in ("Fatal Python error: Aborted", "in die_of_a_fault", "in wait_beside"):
        assert printed in errors.read_text()


def test_ranks_see_the_given_environment() -> None:
    assert run_ranks(1, read_variable, "FXPAR_COLOUR", environment={"FXPAR_COLOUR": "green"}) == ["green"]


def test_each_rank_enters_its_place_with_its_environment_before_it_joins_the_group() -> None:
    found = run_ranks(2, read_variable, "FXPAR_PLACE", environment={"FXPAR_TOWN": "Ulm"}, enter=note_place)
    assert found == [f"Ulm, house {rank}, joined: False" for rank in range(2)]


def test_a_rank_that_cannot_enter_its_place_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 failed:\n(.|\n)*no entry for 0"):
        run_ranks(1, read_variable, "HOME", enter=fail_to_enter)


def test_ranks_end_when_their_caller_is_killed() -> None:
    with running("tests.world.test_launch", "hold_ranks") as caller:
        assert next_line(caller) == "all are there"
        kill_and_await_end_of_all(caller)


def test_gradients_flow_in_ranks_after_they_flowed_in_the_caller() -> None:
    assert run_ranks(1, differentiate) == [differentiate()]


def test_ranks_are_not_forked_from_a_process_of_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A lock that another thread holds at the fork is never released: a progress bar's monitor hung a rank."""
    started = "import threading\nthreading.Thread(target=threading.Event().wait, name='ticker', daemon=True).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(started)
    monkeypatch.syspath_prepend(str(tmp_path))
    line = RankServers.own().fork(0, ["starts_a_thread"])
    with pytest.raises((EOFError, ConnectionError)):
        line.recv()
    printed = capfd.readouterr().err
    assert "importing starts_a_thread left 2 (of Python, besides the main one: ticker)" in printed
