"""What users get wrong is said on every rank that it concerns: inputs, results, lost ranks."""

from __future__ import annotations

import pytest

from fxpar.world.launch import run_ranks
from tests.support.mistakes import be_killed, go_on_after_a_failure, leave_early, use_wrongly, wait_long


def test_wrong_inputs_and_uses_of_results_are_named_on_every_rank() -> None:
    (inputs, first, of_all), (other_inputs, last, other_of_all) = run_ranks(2, use_wrongly)
    assert inputs == other_inputs
    different, permuted, shapes, unchecked = inputs
    assert different.startswith("InputMismatchError: ranks that differ only along the axes pipe, y and x")
    assert "argument 'target' of ranks 1 is not that of rank 0" in different
    assert "'x'" not in different
    assert "fxpar.batch_rank(mesh)" in different
    assert "argument 'x' of ranks 1 is not that of rank 0" in permuted
    assert shapes.startswith("PlanMismatchError")
    assert "the arguments of the forward (ranks 1; rank 0 has 'x: torch.float32 (" in shapes
    assert unchecked == ""
    _check_uses_on_other_stages(first)
    right, shown, *uses, added, alone = last
    assert right == "True"
    assert shown.startswith("DTensor(")
    assert uses == [""] * len(uses)
    for message in (added, alone, of_all[0], other_of_all[0]):
        assert message.startswith(
            "NotTheLossError: result 0 of the forward (torch.float32, shape () for each microbatch)"
        )
        assert "which is result 1 of the forward" in message
        assert "return the sum as the loss" in message
    assert len(of_all) == len(other_of_all) == 1, (of_all, other_of_all)


def _check_uses_on_other_stages(found: list[str]) -> None:
    """On the rank of the first stage, `fxpar.reshard` gets at the values, and all else says why it cannot."""
    right, shown, *uses = found
    assert right == "True"
    assert shown.startswith("RemoteResult(result 2 of the forward")
    for use in uses:
        assert use.startswith("RemoteResultError: result "), use
        assert "is held by rank 1, of the last stage, and its values are not on this rank: use" in use
        assert '{"results": "all"}' in use


@pytest.mark.parametrize("sizes", [{"pipe": 2}])
def test_a_rank_that_ends_before_its_first_step_is_missed_by_the_others(sizes: dict[str, int]) -> None:
    (message,) = run_ranks(2, leave_early, sizes, doomed=[1])
    assert message.startswith("PeerLostError: lost another rank while moving what all ranks compare"), message
    assert message.endswith("(RuntimeError)")


@pytest.mark.parametrize(
    ("sizes", "moving"),
    [({"x": 2}, "values of 0F0 among the ranks of stage 0"), ({"data": 2}, "gradients to their sum over axis data")],
)
def test_a_rank_that_is_killed_is_missed_by_what_its_group_does(sizes: dict[str, int], moving: str) -> None:
    (message,) = run_ranks(2, be_killed, sizes, doomed=[1])
    assert message.startswith(f"PeerLostError: lost another rank while moving {moving}: "), message
    assert message.endswith("(RuntimeError)")


def test_after_a_step_that_failed_none_takes_what_was_sent_for_it() -> None:
    for failed, *later in run_ranks(2, go_on_after_a_failure):
        reason, _, _ = failed.partition("\n")
        assert later == [later[0]] * 2
        assert later[0].startswith(f"BrokenWorldError: an earlier step failed on this rank ({reason}"), later


def test_a_long_wait_is_warned_of_while_it_lasts() -> None:
    (said, nothing) = run_ranks(2, wait_long)
    assert said == ["has waited 0.01 s for rank 1"]
    assert nothing == []
