"""Ranks share the generation of code: once for all that need it, and nobody waits for the failed or the dead."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._inductor import config as inductor_config

from fxpar._torch.compiler import FakeTensorMode, make_fx
from fxpar.cache.folder import CacheFolder
from fxpar.lowering import inductor
from fxpar.lowering.joint_compilation import joint_compilation
from fxpar.lowering.joint_generation import deferred_code, joint_generation
from fxpar.lowering.kept_code import Source
from fxpar.world.agreement import of_all_ranks
from fxpar.world.launch import RankFailedError, run_ranks
from tests.lowering.graphs import note_generated

COMMON, OWN = [6, 7], [[8], [9, 10]]


def program(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (torch.nn.functional.gelu(x @ weight).softmax(-1),)


def arguments(rows: int) -> list[Tensor]:
    return [torch.linspace(-1, 1, rows * 8).view(rows, 8), torch.linspace(0, 2, 64).view(8, 8)]


def traced(rows: int) -> fx.GraphModule:
    """One region, which is different for each number of rows."""
    with FakeTensorMode() as mode:
        graph: fx.GraphModule = make_fx(program)(*map(mode.from_tensor, arguments(rows)))
    return graph


def lower_and_run(rows: Sequence[Sequence[int]], processors: int | None = None) -> tuple[list[list[Tensor]], int]:
    """What this rank's programs return, and for how many regions it generated code."""
    if processors is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])
    generated = note_generated()
    own = rows[dist.get_rank()]
    dist.barrier()
    with joint_compilation(), joint_generation(dist.get_rank(), of_all_ranks):
        lowered = [inductor.lower_to_inductor(traced(each)) for each in own]
    return [list(run(*arguments(each))) for run, each in zip(lowered, own, strict=True)], len(generated)


def launch(folder: Path, rows: Sequence[Sequence[int]], processors: int | None = None) -> list[Any]:
    """Run it on a rank for each list of rows, with caches of their own in `folder`."""
    caches = {"FXPAR_CACHE_DIR": str(folder / "fxpar"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return run_ranks(len(rows), lower_and_run, rows, processors, environment=caches)


def kept(folder: Path) -> dict[str, bytes]:
    """All code that was kept, by the digest of the region's description."""
    return {file.name: file.read_bytes() for file in CacheFolder(folder / "fxpar")._files()}


def test_each_region_is_generated_once_and_its_code_is_the_same_whoever_generates_it(tmp_path: Path) -> None:
    together = launch(tmp_path / "together", [[*COMMON, *own] for own in OWN])
    everything = [*COMMON, *OWN[0], *OWN[1]]
    ((alone, generated_alone),) = launch(tmp_path / "alone", [everything[::-1]])
    assert sum(generated for _, generated in together) == generated_alone == len(everything)
    # Beside the code, the first that asks keeps what it found out about the processor; a server may have asked before.
    same = kept(tmp_path / "together").items() & kept(tmp_path / "alone").items()
    assert len(same) == len(everything)
    expected = dict(zip(everything[::-1], alone, strict=True))
    for own, (found, _) in zip(OWN, together, strict=True):
        for rows, results in zip([*COMMON, *own], found, strict=True):
            assert all(map(torch.equal, results, expected[rows]))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the processors of a process can be chosen on Linux")
def test_of_ranks_that_share_a_processor_one_generates_what_any_needs(tmp_path: Path) -> None:
    found = launch(tmp_path, [[*COMMON, *own] for own in OWN], processors=1)
    assert [generated for _, generated in found] == [len({*COMMON, *OWN[0], *OWN[1]}), 0]


def test_a_rank_that_lacks_nothing_takes_part(tmp_path: Path) -> None:
    found = launch(tmp_path, [[], COMMON, []])
    assert [generated for _, generated in found] == [0, len(COMMON), 0]


def test_code_that_a_rank_needs_twice_is_generated_once(tmp_path: Path) -> None:
    """Two stages of a rank may have equal layers."""
    ((results, generated),) = launch(tmp_path, [[6, 6]])
    assert generated == 1
    assert all(map(torch.equal, *results))


def generate_on_rank_0_with_other_options() -> int:
    """How many regions this rank generates code for; the other one's options are not those that it was asked for."""
    processors = sorted(os.sched_getaffinity(0))[:1]
    os.sched_setaffinity(0, processors)
    inductor_config.cpp.simdlen = dist.get_rank()
    generated = note_generated()
    with joint_compilation(), joint_generation(dist.get_rank(), of_all_ranks):
        inductor.lower_to_inductor(traced(6))
    return len(generated)


def test_code_is_generated_with_the_options_of_the_rank_that_needs_it(tmp_path: Path) -> None:
    caches = {"FXPAR_CACHE_DIR": str(tmp_path / "fxpar"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    assert run_ranks(2, generate_on_rank_0_with_other_options, environment=caches) == [1, 1]


def call_deferred(generate: Callable[[int], Any]) -> str:
    """What code that all ranks need returns, or the error of its generation; runs on every rank."""
    try:
        with joint_generation(dist.get_rank(), of_all_ranks):
            code = deferred_code("a region", Source(traced(6), backward=False), lambda _: generate(dist.get_rank()))
    except ValueError as error:
        return str(error)
    return str(code([]))


def fail(rank: int) -> Any:
    raise ValueError("there is no code for this region")


def count(rank: int) -> Any:
    return lambda box: [rank]  # no module, which could be kept


def test_an_error_reaches_every_rank_that_needs_the_region(tmp_path: Path) -> None:
    found = run_ranks(3, call_deferred, fail, environment={"FXPAR_CACHE_DIR": str(tmp_path)})
    assert found == ["there is no code for this region"] * 3


def test_each_rank_generates_for_itself_what_cannot_be_kept(tmp_path: Path) -> None:
    assert run_ranks(2, call_deferred, count, environment={"FXPAR_CACHE_DIR": str(tmp_path)}) == ["[0]", "[1]"]


def die_on_rank_0(rank: int) -> Any:
    if rank == 0:
        os._exit(1)
    return count(rank)


def test_no_rank_waits_for_one_that_died_while_it_generated(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="PeerLostError"):
        run_ranks(2, call_deferred, die_on_rank_0, environment={"FXPAR_CACHE_DIR": str(tmp_path)}, doomed=[0])
