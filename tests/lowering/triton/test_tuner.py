"""The tuner takes what is fastest, the plain way too, and remembers it, unless what it finds on disk is no memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from fxpar.lowering.triton.plan import Fused, How, Pipelined, Unfused
from fxpar.lowering.triton.tiling import Tiling
from fxpar.lowering.triton.tuner import Memory, TuningProblem, fastest, gather_variants

SMALL, LARGE = Tiling(64, 64, 32, warps=4, stages=3), Tiling(128, 256, 64, warps=8, stages=3)
PROBLEM = TuningProblem("gather rows", (1, 8192, 6144, 12288), "rt", "bfloat16", 1, 8, "H200", "nvlink", "3.7.1")


def times(tiling_us: Callable[[Tiling], float], segment_us: float, unfused_us: float) -> Callable[[How], float]:
    """Ways whose time is that of their tiling, and something for every row of a segment; pushing saves 1."""

    def time_us(how: How) -> float:
        if not isinstance(how, Fused):
            return unfused_us - isinstance(how, Pipelined)
        return tiling_us(how.tiling) + segment_us * how.segment_rows - how.pushes

    return time_us


def test_the_best_of_tilings_segments_and_directions_is_found() -> None:
    ways = gather_variants(SMALL, 1000)
    found = fastest([SMALL, LARGE], ways, times(lambda tiling: 1e4 / tiling.m, 0.01, 1e9))
    assert found == (Fused(LARGE, 250, pushes=True), 1e4 / 128 + 2.5 - 1)


def test_the_plain_way_is_taken_where_it_is_faster() -> None:
    assert fastest([SMALL], gather_variants(SMALL, 64), times(lambda _: 20.0, 0, 12.0)) == (Unfused(), 12.0)


def test_the_op_of_pytorch_is_taken_where_there_is_one_and_it_is_the_fastest() -> None:
    time_us = times(lambda _: 20.0, 0, 12.0)
    assert fastest([SMALL], gather_variants(SMALL, 64), time_us, has_pipelined=True) == (Pipelined(), 11.0)
    assert fastest([SMALL], gather_variants(SMALL, 64), time_us) == (Unfused(), 12.0)


def test_what_is_impossible_is_not_taken() -> None:
    only_small = times(lambda tiling: 5.0 if tiling == SMALL else math.inf, 0, 9.0)
    how, _ = fastest([LARGE, SMALL], gather_variants(SMALL, 1), only_small)
    assert isinstance(how, Fused) and how.tiling == SMALL
    assert fastest([LARGE], gather_variants(SMALL, 1), only_small)[0] == Unfused()
    assert fastest([], gather_variants(SMALL, 1), only_small)[0] == Unfused()


def test_segments_are_no_larger_than_blocks_and_none_is_tried_twice() -> None:
    assert [way.segment_rows for way in gather_variants(SMALL, 1) if not way.pushes] == [1]
    assert [way.segment_rows for way in gather_variants(SMALL, 10) if way.pushes] == [10, 5, 3]


@pytest.mark.parametrize("how", [Unfused(), Pipelined(), Fused(replace(LARGE, descriptors=True), 512, pushes=True)])
def test_what_was_found_is_remembered_for_that_problem_alone(tmp_path: Path, how: How) -> None:
    memory = Memory(tmp_path / "tuned")
    assert memory.recall(PROBLEM) is None
    memory.keep(PROBLEM, how, 12.5)
    assert Memory(tmp_path / "tuned").recall(PROBLEM) == how
    for other in (
        replace(PROBLEM, dtype="float16"),
        replace(PROBLEM, parts=4),
        replace(PROBLEM, link="PCIe"),
        replace(PROBLEM, versions="3.6.0"),
        replace(PROBLEM, sizes=(1, 64, 6144, 12288)),
        replace(PROBLEM, has_pipelined=True),
    ):
        assert memory.recall(other) is None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", "cut", '{"how": "fast"}', '{"how": null}', '"descriptors": "yes"', "another"]
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, damage: str) -> None:
    memory = Memory(tmp_path)
    memory.keep(PROBLEM, Fused(LARGE, 512), 12.5)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    replaced = {
        "cut": whole[: len(whole) // 2],
        '"descriptors": "yes"': whole.replace('"descriptors": false', damage),
        "another": whole.replace("H200", "H100"),
    }
    text = replaced.get(damage, damage)
    assert text != whole
    file.write_text(text)
    assert memory.recall(PROBLEM) is None
    memory.keep(PROBLEM, Unfused(), 1.0)
    assert memory.recall(PROBLEM) == Unfused()


def test_who_reads_while_others_write_finds_a_whole_file(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    ways: list[Fused | Unfused] = [Unfused(), Fused(SMALL, 1), Fused(LARGE, 123456789)]
    memory.keep(PROBLEM, ways[0], 1.0)

    def write() -> None:
        for turn in range(200):
            memory.keep(PROBLEM, ways[turn % 3], float(turn))

    writers = [Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert memory.recall(PROBLEM) in ways
    assert len(list(tmp_path.iterdir())) == 1
