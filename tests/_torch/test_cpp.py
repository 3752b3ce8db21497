"""Inductor's vector instructions are found as before, but none are tested that nobody asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

from torch._inductor import cpu_vec_isa

from fxpar._torch.cpp import LazySequence, cpu_vector_isa
from fxpar.lowering import vector_isa
from fxpar.lowering.vector_isa import find_vector_isa
from fxpar.world.launch import run_ranks


class Item:
    """Notes that it is tested."""

    def __init__(self, log: list[int], number: int) -> None:
        self._log, self.number = log, number

    def __bool__(self) -> bool:
        self._log.append(self.number)
        return self.number % 2 == 0


def passing(items: Iterable[Item]) -> LazySequence[Item]:
    """Those that pass."""
    return LazySequence(item for item in items if item)


def test_items_are_tested_once_and_only_as_far_as_asked_for() -> None:
    log: list[int] = []
    found = passing(Item(log, number) for number in range(1, 8))
    assert found and found[0].number == 2 and log == [1, 2]
    assert next(item.number for item in found if item.number > 2) == 4 and log == [1, 2, 3, 4]
    assert [item.number for item in found] == [2, 4, 6] and len(found) == 3 and found[-1].number == 6
    assert log == [*range(1, 8)]


def test_threads_that_ask_for_the_same_item_test_it_once() -> None:
    log: list[int] = []
    found = passing(Item(log, number) for number in range(2, 8))
    threads = [Thread(target=lambda: found[0]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == [2]


def described(isa: cpu_vec_isa.VecISA) -> tuple[str, str]:
    """The name of vector instructions, and the compiler's flags for them."""
    return str(isa), isa.build_arch_flags()


def find_both_ways() -> list[tuple[list[tuple[str, str]], tuple[str, str]]]:
    """Inductor's list of vector instructions and its choice, before and after the change; in a process of its own."""
    before = [*map(described, cpu_vec_isa.valid_vec_isa_list())], described(cpu_vec_isa.pick_vec_isa())
    find_vector_isa()
    chosen = described(cpu_vector_isa(vector_isa._usable)())
    return [before, ([*map(described, cpu_vec_isa.valid_vec_isa_list())], chosen)]


def test_the_answer_is_inductors() -> None:
    ((before, after),) = run_ranks(1, find_both_ways)
    assert before == after


def flags_and_tests() -> tuple[str, str, int]:
    """The flags of the vector instructions to use, and after how many tests here they were known."""
    tests = []
    test = cpu_vec_isa.VecISA.check_build
    cpu_vec_isa.VecISA.check_build = lambda self, code: tests.append(code) or test(self, code)
    find_vector_isa()
    found = cpu_vector_isa(vector_isa._usable)()
    assert found, "generated code is in these instructions"
    return *described(found), len(tests)


def test_whoever_reads_the_answer_compiles_with_the_flags_of_those_who_tested_it(tmp_path: Path) -> None:
    caches = {"FXPAR_CACHE_DIR": str(tmp_path / "fxpar"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    # An interpreter that no other test has used: what it has tested, it keeps for as long as it lives.
    ask = [sys.executable, "-c", "from tests._torch.test_cpp import flags_and_tests as f; print(*f(), sep=chr(10))"]

    def answer() -> list[str]:
        asked = subprocess.run(
            ask, env=os.environ | caches, cwd=Path(__file__).parents[2], capture_output=True, text=True
        )
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.splitlines()

    first, second = answer(), answer()
    assert int(first[-1]) > 0, "it tests"
    assert second == [*first[:-1], "0"]
