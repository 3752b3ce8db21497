"""Gradients end as sums over what is partial and over the batch shards, in few messages, each in memory of its own."""

from __future__ import annotations

import torch

from fxpar.runtime.gradients import own_memory
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh
from tests.runtime.reduce_gradients import LAYOUTS, gradients_of, lose_a_rank, messages_for, reduce_all


def test_partial_gradients_are_summed_over_their_axis_and_all_over_the_batch_shards() -> None:
    sizes = {"data": 2, "x": 2}
    mesh = Mesh(**sizes)
    for rank, reduced in enumerate(run_ranks(mesh.num_ranks, reduce_all, sizes)):
        at = mesh.coordinate_of(rank)
        for name, found in reduced.items():
            parts = [
                gradients_of(other)[name]
                for other in range(mesh.num_ranks)
                if LAYOUTS[name].is_partial or mesh.coordinate_of(other)["x"] == at["x"]
            ]
            torch.testing.assert_close(found, torch.stack(parts).sum(0), msg=lambda text, name=name: f"{name}: {text}")


def test_nothing_is_reduced_along_axes_of_one_rank() -> None:
    (reduced,) = run_ranks(1, reduce_all, {})
    assert all(torch.equal(reduced[name], gradient) for name, gradient in gradients_of(0).items())


def test_small_gradients_share_a_message_and_large_ones_do_not() -> None:
    mb = 2**20
    for messages, sums_are_right in run_ranks(2, messages_for, [1, 2, 20, 6, 25, 1]):
        assert messages == [23 * mb, 6 * mb, 25 * mb, 1 * mb]
        assert sums_are_right


def test_a_lost_rank_ends_the_reduction() -> None:
    (error,) = run_ranks(2, lose_a_rank, doomed=[1], timeout_s=100)
    assert error.startswith("lost rank 1 while moving gradients to their sum over axis data: its process has")


def test_gradients_that_share_memory_part() -> None:
    """With each other, with what is being sent, or within themselves, as expanded ones do."""
    base, sent = torch.randn(4, 2), torch.randn(3)
    given = [base, base, base[1], base.t(), torch.ones(1).expand(5), sent, torch.randn(2)]
    before = [gradient.clone() for gradient in given]
    owned = own_memory(given, [sent])
    for position, gradient in enumerate(owned):
        gradient.add_(1)
        for other in range(len(owned)):
            torch.testing.assert_close(owned[other], before[other] + (1 if other <= position else 0))
    assert torch.equal(sent, before[5])
    assert owned[0] is base and owned[-1] is given[-1], "copied for nothing"
