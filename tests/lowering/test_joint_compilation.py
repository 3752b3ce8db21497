"""Kernels that are compiled together are what Inductor would have compiled one by one, and are where it finds them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError

from fxpar.lowering import compile_kernels, lower
from fxpar.lowering import joint_compilation as joint
from fxpar.lowering.joint_compilation import joint_compilation
from fxpar.world.launch import RankFailedError, run_ranks
from tests.lowering.graphs import forward_and_backward
from tests.support.small_models import GPT


def source(value: float | str) -> str:
    """A kernel that writes `value`. No earlier run has compiled it."""
    return f'#include <cstdint>\nextern "C" void kernel(float* out) {{ *out = {value}; }} // {time.time()}\n'


def module(*sources: str) -> dict[str, Any]:
    """The globals of a module with these kernels, made as generated code makes them."""
    compiler = AsyncCompile()
    scope = {f"kernel_{index}": compiler.cpp_pybinding(["float*"], source) for index, source in enumerate(sources)}
    compiler.wait(scope)
    return scope


def values(scope: dict[str, Any]) -> list[float]:
    """What the kernels write."""
    outs = [torch.zeros(1) for _ in scope]
    for kernel, out in zip(scope.values(), outs, strict=True):
        kernel(out)
    return [out.item() for out in outs]


def libraries(scope: dict[str, Any]) -> list[Path]:
    """The files that the kernels were loaded from."""
    return [Path(kernel.__self__.__file__) for kernel in scope.values()]


@contextmanager
def watching() -> Iterator[list[str]]:
    """The names of the shared objects that this process builds."""
    built: list[str] = []
    build = CppBuilder.build

    def watched(self: CppBuilder) -> None:
        target = Path(self.get_target_file_path())
        if target.suffix == ".so":
            built.append(target.name)
        build(self)

    with patch.object(CppBuilder, "build", watched):
        yield built


def compile_by_inductor(*sources: str) -> tuple[list[float], list[str]]:
    """What the kernels write, and what was built for them, without fxpar; for a process of its own."""
    with watching() as built:
        return values(module(*sources)), built


def compile_jointly(*sources: str) -> tuple[list[float], list[str]]:
    """The same with fxpar."""
    with watching() as built, joint_compilation():
        scope = module(*sources)
    return values(scope), built


def test_kernels_of_several_modules_are_compiled_in_one_run() -> None:
    module(source(0))  # looks for vector instructions, too
    with watching() as built, joint_compilation():
        scopes = [module(source(1), source(2)), module(source(3))]
        with joint_compilation():
            scopes.append(module(source(4)))
        assert not built
    assert built == ["kernels.so"]
    assert [values(scope) for scope in scopes] == [[1, 2], [3], [4]]
    assert len({file.stat().st_ino for scope in scopes for file in libraries(scope)}) == 1


def gather(given: Any, ranks: Sequence[int]) -> list[Any]:
    """A collective of all ranks; returns what those of `ranks` gave."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, given)
    return [found[rank] for rank in ranks]


def compile_in_parts(
    rows: Sequence[Sequence[str]], unit_chars: int, machines: Sequence[int] = (0, 0, 0)
) -> tuple[list[float], list[str]]:
    """What the kernels of this rank's row write, and what it built, where ranks of a machine compile together."""
    rank = dist.get_rank()
    here = [other for other, machine in enumerate(machines[: len(rows)]) if machine == machines[rank]]
    with (
        patch.object(compile_kernels, "SHARED_UNIT_CHARS", unit_chars),
        watching() as built,
        joint_compilation(len(here), here.index(rank), lambda given: gather(given, here)),
    ):
        scope = module(*rows[rank])
    return values(scope), built


@pytest.mark.parametrize(("unit_chars", "num_units"), [(10**6, 1), (10, 2)])
def test_processes_compile_parts_of_what_any_of_them_needs(unit_chars: int, num_units: int) -> None:
    module(source(0))  # looks for vector instructions, too
    shared, first, second, third = (source(number) for number in range(1, 5))
    found = run_ranks(3, compile_in_parts, [[shared, first], [shared, second], [third]], unit_chars)
    assert [wrote for wrote, _ in found] == [[1, 2], [1, 3], [4]]
    assert [built for _, built in found] == [["kernels.so"]] * num_units + [[]] * (3 - num_units)


def test_a_part_that_does_not_compile_is_the_error_of_those_that_need_it() -> None:
    module(source(0))
    good, bad, other = source(1), source("undeclared"), source(2)
    with pytest.raises(RankFailedError, match="undeclared"):
        run_ranks(2, compile_in_parts, [[good, bad], [other]], 10**6)
    (found,) = run_ranks(1, compile_by_inductor, good, other)
    assert found == ([1, 2], [])


@pytest.mark.parametrize("lacks", [0, 1, 2])
def test_a_process_that_is_alone_on_its_machine_takes_part_whatever_it_lacks(lacks: int) -> None:
    module(source(0))
    first, second, *others = (source(number) for number in range(1, 5))
    rows = [[first], [first, second], others[:lacks]]
    found = run_ranks(3, compile_in_parts, rows, 10**6, (0, 0, 1))
    assert [wrote for wrote, _ in found] == [[1], [1, 2], [3, 4][:lacks]]


def test_inductor_finds_them_in_a_process_that_does_not_use_fxpar() -> None:
    sources = [source(1), source(2)]
    with joint_compilation():
        scope = module(*sources)
    (found,) = run_ranks(1, compile_by_inductor, *sources)
    assert found == ([1, 2], [])
    libraries(scope)[0].unlink()
    (found,) = run_ranks(1, compile_by_inductor, *sources)
    assert found == ([1, 2], [libraries(scope)[0].name])


def test_a_kernel_that_does_not_compile_fails_with_inductors_error_and_alone() -> None:
    good, bad, other = source(1), source("undeclared"), source(2)
    with pytest.raises(CppCompileError, match="undeclared"), joint_compilation():
        module(good, bad, other)
    (found,) = run_ranks(1, compile_by_inductor, good, other)
    assert found == ([1, 2], [])


def test_kernels_with_macros_of_their_own_or_other_headers_stay_apart() -> None:
    macro, header = f"#define VALUE 5\n{source('VALUE')}", f"#include <cmath>\n{source('std::sqrt(36.0f)')}"
    with watching() as built, joint_compilation():
        scope = module(source(1), macro, header, source(2))
    assert values(scope) == [1, 5, 6, 2]
    assert len(built) == 3 and built[0] == "kernels.so"


def test_large_kernels_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpar.lowering.compile_kernels.UNIT_CHARS", 1000)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})

    def alone(given: Any) -> list[Any]:
        return [given]

    for processes, gather_all, num_builds in ((1, None, 2), (1, alone, 2), (2, None, 1)):
        with watching() as built, joint_compilation(processes, 0, gather_all):
            scope = module(*map(source, range(6)))
        assert values(scope) == [*range(6)]
        assert len(built) == num_builds


def test_after_an_error_of_the_caller_kernels_are_compiled_when_they_are_called() -> None:
    scope: dict[str, Any] = {}
    with pytest.raises(ZeroDivisionError), joint_compilation():
        scope |= module(source(1))
        _ = 1 / 0
    assert values(scope) == [1]


def test_a_damaged_library_is_compiled_again() -> None:
    sources = [source(1), source(2)]
    with joint_compilation():
        scope = module(*sources)
    damaged = libraries(scope)[0]
    damaged.unlink()
    damaged.write_bytes(b"no library")
    (found,) = run_ranks(1, compile_jointly, *sources)
    assert found == ([1, 2], [damaged.name])
    (found,) = run_ranks(1, compile_by_inductor, *sources)
    assert found == ([1, 2], [])


def compile_at_once(common: Sequence[str], own: Sequence[Sequence[str]]) -> tuple[list[float], int]:
    """What the kernels write, and how many libraries this rank built; runs on every rank."""
    module(source(0))  # looks for vector instructions, too
    dist.barrier()
    with watching() as built, joint_compilation():
        scope = module(*common, *own[dist.get_rank()])
    return values(scope), len(built)


def test_ranks_share_the_work_and_what_they_have_in_common_is_compiled_once() -> None:
    common = [source(1), source(2)]
    alike = run_ranks(3, compile_at_once, common, [[]] * 3)
    assert [found for found, _ in alike] == [[1, 2]] * 3
    assert sum(num_builds for _, num_builds in alike) == 1
    common = [source(1), source(2)]
    different = run_ranks(2, compile_at_once, common, [[source(3), source(4)], [source(5), source(6)]])
    assert [found for found, _ in different] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert sum(num_builds for _, num_builds in different) == 2


def test_ranks_whose_kernels_do_not_compile_do_not_wait_for_each_other() -> None:
    bad = [source("undeclared"), source("unknown")]
    for found in run_ranks(2, fail_at_once, bad):
        assert "CppCompileError" in found


def fail_at_once(sources: Sequence[str]) -> str:
    """The error of kernels that do not compile; runs on every rank."""
    dist.barrier()
    try:
        with joint_compilation():
            module(*sources)
    except CppCompileError as error:
        return type(error).__name__
    return ""


def run_model(together: bool) -> tuple[list[Tensor], int]:
    """What a small model returns, and how many libraries were built for it; for a process of its own."""
    torch.manual_seed(0)
    tokens = torch.randint(96, (2, 12))
    results: list[Tensor] = []
    active = joint._is_active.set(not together)  # then what should compile them together leaves them to Inductor
    with watching() as built:
        for case in forward_and_backward(GPT(layers=1), tokens, tokens):
            results += [value for value in lower("inductor")(case.graph)(*case.inputs) if value is not None]
    joint._is_active.reset(active)
    return results, len([name for name in built if name == "kernels.so" or name.endswith(".main.so")])


def test_results_have_the_same_bits_as_those_of_kernels_that_are_compiled_alone_and_a_warm_start_compiles_nothing(
    tmp_path: Path,
) -> None:
    def run(name: str, together: bool) -> tuple[list[Tensor], int]:
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)}
        (found,) = run_ranks(1, run_model, together, environment=cache)
        return found

    jointly, few = run("jointly", True)
    alone, many = run("alone", False)
    again, none = run("jointly", True)
    assert (few, none) == (2, 0) and many > 4
    for found in (alone, again):
        assert all(torch.equal(a, b) for a, b in zip(found, jointly, strict=True))
