"""A rank that ends or fails in the midst of a step is missed by all others, over groups that tell nobody of it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch

from fxpar.world.launch import RankFailedError, run_ranks
from tests.support.gpu_ranks import join_nccl
from tests.support.lose_ranks import (
    be_killed,
    be_unable_to_end_a_wait,
    fail,
    leave_a_child,
    lose_amid_step,
    lose_between_steps,
    start_anew,
    wait_on_the_host,
)

MESHES = {
    "pipeline of sharded stages": {"pipe": 2, "x": 2},
    "weights in shards": {"z": 2},
    "tensor parallelism": {"x": 2},
}
ENDINGS = {be_killed: "its process has ended", fail: "its step has failed (BrokenBatchError: class 7 of 3)"}
HANGS = [
    (MESHES["pipeline of sharded stages"], be_killed, False),
    (MESHES["pipeline of sharded stages"], fail, True),
    (MESHES["weights in shards"], fail, False),
    (MESHES["tensor parallelism"], be_killed, True),
]


def lose(sizes: dict[str, int], lost: int, end: Callable[[], None], *options: Any) -> list[list[str]]:
    """The errors of all ranks but the one that is lost, of the step in which it is and of the next; it has its own."""
    num_ranks = prod(sizes.values())
    doomed = [] if end is fail else [lost]
    found = run_ranks(num_ranks, lose_amid_step, sizes, lost, end, *options, doomed=doomed)
    if end is fail:
        own_error, later = found.pop(lost)
        assert own_error == "BrokenBatchError: class 7 of 3"
        assert later.startswith(f"BrokenWorldError: an earlier step failed on this rank ({own_error}")
    assert len(found) == num_ranks - 1
    return found


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_a_step_without_a_rank_ends_on_all_others(sizes: dict[str, int], end: Callable[[], None]) -> None:
    last = prod(sizes.values()) - 1
    for error, later in lose(sizes, last, end):
        assert error.startswith(f"PeerLostError: lost rank {last} while moving "), error
        assert ENDINGS[end] in error
        assert later.startswith(f"BrokenWorldError: an earlier step failed on this rank ({error}")


def test_the_first_rank_is_missed_like_others() -> None:
    for error, _ in lose({"pipe": 2, "x": 2}, 0, be_killed):
        assert error.startswith("PeerLostError: lost rank 0 while moving "), error


def test_a_rank_whose_child_lives_on_is_missed() -> None:
    for error, _ in lose({"x": 2}, 1, leave_a_child):
        assert error.startswith("PeerLostError: lost rank 1 while moving "), error


@pytest.mark.parametrize("end", ENDINGS)
def test_a_wait_for_the_device_after_the_step_ends(end: Callable[[], None]) -> None:
    for error, later in lose({"pipe": 2, "x": 2}, 3, end, True, True):
        assert error.startswith("PeerLostError: lost rank 3 while moving what the device waits for: "), error
        assert ENDINGS[end] in error
        assert later.startswith("PeerLostError: lost rank 3 while moving what a step needs: ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}])
def test_a_read_of_the_loss_ends_over_nccl(sizes: dict[str, int], end: Callable[[], None]) -> None:
    for error, later in lose(sizes, 1, end, True, True, join_nccl):
        assert error.startswith("PeerLostError: lost rank 1 while moving "), error
        assert ENDINGS[end] in error
        assert later.startswith(("PeerLostError: ", "BrokenWorldError: ")), later


@pytest.mark.parametrize(("sizes", "end", "runs_ahead"), HANGS)
def test_without_the_watch_all_others_hang(sizes: dict[str, int], end: Callable[[], None], runs_ahead: bool) -> None:
    last = prod(sizes.values()) - 1
    for error, _ in lose(sizes, last, end, False, runs_ahead):
        assert error.startswith("HangError: "), error


def test_what_needs_no_lost_rank_goes_on() -> None:
    for goes_on, error in run_ranks(3, lose_between_steps, doomed=[2]):
        assert goes_on
        assert error.startswith("PeerLostError: lost rank 2 while moving what a step needs: "), error


def test_ranks_that_form_the_world_anew_go_on() -> None:
    (before, missing, after), (other_before, own_error, other_after) = run_ranks(2, start_anew)
    assert missing.startswith("PeerLostError: lost rank 1 while moving ")
    assert own_error.startswith("BrokenBatchError: ")
    assert before == after == other_before == other_after


def test_a_wait_of_the_host_ends() -> None:
    (error,) = run_ranks(2, wait_on_the_host, doomed=[1])
    assert error.startswith("PeerLostError: lost rank 1 while moving a part of it: its process has ended"), error


def test_a_rank_whose_wait_does_not_end_says_why_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError, match="rank 0 failed"):
        run_ranks(2, be_unable_to_end_a_wait, doomed=[1])
    assert "PeerLostError: lost rank 1 while moving what the device waits for: " in capfd.readouterr().err
