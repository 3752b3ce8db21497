"""Inductor's vector instructions are found as before, but none are tested that nobody asks for."""

from __future__ import annotations

from threading import Thread

from torch._inductor import cpu_vec_isa

from fxpar._torch_cpp import LazyFilter, cpu_vector_isa
from fxpar.lowering.vector_isa import find_vector_isa
from fxpar.world.launch import run_ranks


class Item:
    """Notes that it is tested."""

    def __init__(self, log: list[int], number: int) -> None:
        self._log, self.number = log, number

    def __bool__(self) -> bool:
        self._log.append(self.number)
        return self.number % 2 == 0


def test_items_are_tested_once_and_only_as_far_as_asked_for() -> None:
    log: list[int] = []
    found = LazyFilter(Item(log, number) for number in range(1, 8))
    assert found and found[0].number == 2 and log == [1, 2]
    assert next(item.number for item in found if item.number > 2) == 4 and log == [1, 2, 3, 4]
    assert [item.number for item in found] == [2, 4, 6] and len(found) == 3 and found[-1].number == 6
    assert log == [*range(1, 8)]


def test_threads_that_ask_for_the_same_item_test_it_once() -> None:
    log: list[int] = []
    found = LazyFilter(Item(log, number) for number in range(2, 8))
    threads = [Thread(target=lambda: found[0]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == [2]


def find_both_ways() -> tuple[list[str], list[str], str, str]:
    """Inductor's list of vector instructions and its choice, before and after the change; in a process of its own."""
    before, chosen = list(cpu_vec_isa.valid_vec_isa_list()), cpu_vec_isa.pick_vec_isa()
    find_vector_isa()
    pick = cpu_vector_isa()
    return [*map(str, before)], [*map(str, cpu_vec_isa.valid_vec_isa_list())], str(chosen), str(pick())


def test_the_answer_is_inductors() -> None:
    ((before, after, chosen, now),) = run_ranks(1, find_both_ways)
    assert (before, chosen) == (after, now)
